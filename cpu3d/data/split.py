"""The split of a store's cases into training, validation and test: what holds of each, its hash,
and the order in which patients are dealt out."""

import hashlib
import json
from collections import defaultdict
from dataclasses import replace
from typing import Dict, Iterable, List, Mapping, Protocol, Sequence, Tuple

from cpu3d.data.normalise import Normalisation

SPLITS = ("train", "val", "test")
Split = Dict[str, Tuple[str, ...]]  # name -> case ids
FOLD_SPLITS = ("train", "val")  # a fold's training cases, and those that it holds out


class SplitCase(Protocol):
    """What a split must know of a case."""

    @property
    def case_id(self) -> str: ...

    @property
    def patient_id(self) -> str: ...


class ReadCase(SplitCase, Protocol):
    """The same of one whose voxels are known."""

    @property
    def image_voxels_sha256(self) -> str: ...

    @property
    def label_voxels_sha256(self) -> str: ...


def split_hash(
    split: Mapping[str, Sequence[str]],
    cases: Iterable[ReadCase],
    folds: Sequence[Mapping[str, Sequence[str]]] = (),
    normalisation: Sequence[Normalisation] = (),
) -> str:
    """A hash, in twelve hex digits, of the case ids of each split, of their voxels, of the case ids
    of given folds, and of a normalisation that is written."""
    voxels = {case.case_id: (case.image_voxels_sha256, case.label_voxels_sha256) for case in cases}
    pairs = {
        name: [(case_id, voxels.get(case_id)) for case_id in sorted(split[name])] for name in SPLITS
    }
    digest = hashlib.sha256(json.dumps(pairs).encode())
    if folds:
        ids = [{name: sorted(fold[name]) for name in FOLD_SPLITS} for fold in folds]
        digest.update(json.dumps(ids).encode())
    if normalisation:
        # By kinds and numbers alone; "why" stands in it as it always has.
        kinds = [{**replace(each, is_chosen=False).to_json(), "why": ""} for each in normalisation]
        digest.update(json.dumps(kinds).encode())
    return digest.hexdigest()[:12]


def division_problems(
    split: Mapping[str, Sequence[str]],
    folds: Sequence[Mapping[str, Sequence[str]]],
    cases: Sequence[SplitCase],
) -> List[str]:
    """A line for each patient, and each image of cases whose voxels are known, in more than one
    part of the split or of a fold: it would be trained on and scored."""
    problems = _straddling(split, cases)
    for number, fold in enumerate(folds, 1):
        problems += [f"fold {number}: {problem}" for problem in _straddling(fold, cases)]
    return problems


def _straddling(split: Mapping[str, Sequence[str]], cases: Sequence[SplitCase]) -> List[str]:
    part_of = {case_id: name for name in split for case_id in split[name]}
    patients: Dict[str, Dict[str, SplitCase]] = defaultdict(dict)  # patient -> part -> a case
    images: Dict[str, Dict[str, SplitCase]] = defaultdict(dict)  # voxels -> part -> a case
    for case in cases:
        part = part_of.get(case.case_id)
        if part is None:
            continue
        patients[case.patient_id][part] = case
        voxels = getattr(case, "image_voxels_sha256", "")
        if voxels:
            images[voxels][part] = case
    problems = []
    for patient, parts in sorted(patients.items()):
        if len(parts) > 1:
            got = " and ".join(f"{case.case_id} in {part}" for part, case in parts.items())
            problems.append(
                f"patient {patient} must be in one split, got {got}; keep its cases together"
            )
    for _, parts in sorted(images.items()):
        if len({case.patient_id for case in parts.values()}) > 1:
            names = " and ".join(f"{case.case_id} ({part})" for part, case in parts.items())
            rule = f"image of cases {names} must be in one split, got identical voxels"
            first = "leave all but one out"
            second = "`prepare` with --patients FILE that gives them one patient"
            problems.append(f"{rule}; {first}, or {second}")
    return problems


def dealing_order(patients: Iterable[str], seed: int) -> List[str]:
    """Patients in the order of the SHA-256 of "seed:patient", which is the same in every version of
    every library."""

    def digest(patient: str) -> str:
        return hashlib.sha256(f"{seed}:{patient}".encode()).hexdigest()

    return sorted(set(patients), key=digest)
