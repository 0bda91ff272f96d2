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
    """What a split must know of a case: its record, or what of it is in memory."""

    @property
    def case_id(self) -> str: ...

    @property
    def patient_id(self) -> str: ...

    @property
    def image_voxels_sha256(self) -> str: ...

    @property
    def label_voxels_sha256(self) -> str: ...


def split_hash(
    split: Mapping[str, Sequence[str]],
    cases: Iterable[SplitCase],
    folds: Sequence[Mapping[str, Sequence[str]]] = (),
    normalisation: Sequence[Normalisation] = (),
) -> str:
    """A hash, in twelve hex digits, of the case ids of each split, of their voxels, of the case ids
    of given folds, and of a normalisation that is written."""
    case_of = {case.case_id: case for case in cases}
    digest = hashlib.sha256(b"{")  # of the JSON of all pairs, which is never in memory as a whole
    for number, name in enumerate(SPLITS):
        digest.update(f"{', ' if number else ''}{json.dumps(name)}: [".encode())
        for place, case_id in enumerate(sorted(split[name])):
            voxels = None
            if case_id in case_of:
                case = case_of[case_id]
                voxels = (case.image_voxels_sha256, case.label_voxels_sha256)
            digest.update(f"{', ' if place else ''}{json.dumps([case_id, voxels])}".encode())
        digest.update(b"]")
    digest.update(b"}")
    if folds:
        ids = [{name: sorted(fold[name]) for name in FOLD_SPLITS} for fold in folds]
        digest.update(json.dumps(ids).encode())
    if normalisation:
        # By kinds and numbers alone; "why" stands in it as it always has.
        unchosen = [replace(each, why="", is_chosen=False) for each in normalisation]
        kinds = [{**each.to_json(), "why": ""} for each in unchosen]
        digest.update(json.dumps(kinds).encode())
    return digest.hexdigest()[:12]


def split_problems(
    split: Mapping[str, Sequence[str]],
    cases: Iterable[SplitCase],
) -> List[str]:
    """A line for each patient and each image in more than one split, which would be trained on and
    scored. `split` may also be a fold, which has no test cases and need not have all others."""
    split_of = {case_id: name for name in split for case_id in split[name]}
    split_cases = [case for case in cases if case.case_id in split_of]

    def straddling(fact: str) -> Dict[str, Dict[str, Tuple[str, str]]]:
        """Value of a fact that cases of several splits share -> split -> (its case, patient)."""
        first: Dict[str, str] = {}
        shared = set()
        for case in split_cases:
            name = split_of[case.case_id]
            if first.setdefault(getattr(case, fact), name) != name:
                shared.add(getattr(case, fact))
        places: Dict[str, Dict[str, Tuple[str, str]]] = defaultdict(dict)
        for case in split_cases if shared else ():
            value = getattr(case, fact)
            if value in shared:
                places[value][split_of[case.case_id]] = (case.case_id, case.patient_id)
        return dict(sorted(places.items()))

    problems = []
    for patient, places in straddling("patient_id").items():
        got = " and ".join(places)
        problems.append(
            f"patient {patient} must be in one split, got {got}; keep its cases together"
        )
    for places in straddling("image_voxels_sha256").values():
        if len({patient_id for _, patient_id in places.values()}) > 1:
            names = " and ".join(f"{case_id} ({name})" for name, (case_id, _) in places.items())
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
