"""How cases of a new store are split into training, validation and testing, and new cases of one
that grows: dealt by shares of patients, or as given folds say.

A patient's cases stay in one split, and on one side of a fold. Folds may be given as nnU-Net writes
them into splits_final.json; the store keeps them."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Annotated,
    Collection,
    Container,
    Dict,
    Iterator,
    List,
    Mapping,
    Sequence,
    Tuple,
)

import msgspec

from cpu3d.data.datasets.names import check_printable, stem_of
from cpu3d.data.manifest import Manifest
from cpu3d.data.split import FOLD_SPLITS, SPLITS, Split, dealing_order
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.records import count, listed
from memory_estimator.common.files import read_json, reason

Fractions = Tuple[float, float, float]


def split_sizes(manifest: Manifest) -> str:
    """The cases of each split, as "8 train, 1 val, 1 test"."""
    return ", ".join(f"{len(manifest.split[name])} {name}" for name in SPLITS)


def split_cases(patients: Mapping[str, str], *, fractions: Fractions, seed: int) -> Split:
    """Deal the patients' cases to "train", "val" and "test" in the ratio of `fractions`; ids come
    back sorted.

    `patients` maps case id -> patient id. Every split with a fraction above 0 gets a patient, then
    always the split furthest behind its share. Raises InputError for bad shares or too few
    patients."""
    total = sum(fractions)
    if min(fractions) < 0 or not 0 < total < math.inf:
        rule = "--split must be three shares of at least 0, not all 0"
        raise InputError(f"{rule}, got {fractions}; try --split 8 1 1")
    words = " ".join(f"{share:g}" for share in fractions)
    order = dealing_order(patients.values(), seed)
    shares = {name: share / total for name, share in zip(SPLITS, fractions) if share > 0}
    if len(order) < len(shares):
        rule = f"--split {words} must have at least {len(shares)} patients with labels"
        todo = "add cases, name --patients, or train on all with --split 1 0 0"
        raise InputError(f"{rule}, got {len(order)}; {todo}")
    wanted = {name: share * len(order) for name, share in shares.items()}
    sizes = _filled(dict.fromkeys(shares, 1), wanted, len(order))
    place = dict(zip(order, _names(sizes)))
    return {
        name: tuple(sorted(case for case in patients if place[patients[case]] == name))
        for name in SPLITS
    }


def deal_cases(
    split: Mapping[str, Sequence[str]],
    patients: Mapping[str, str],
    new: Mapping[str, str],
    *,
    seed: int,
) -> Split:
    """The split with the new cases in it. `patients` and `new` map case id -> patient id.

    A case of a known patient goes to that patient's split. The others are dealt so that each split
    keeps its share of the patients; a split without patients gets none."""
    place = {patients[case_id]: name for name in SPLITS for case_id in split[name]}
    have = Counter(place.values())
    fresh = dealing_order(set(new.values()) - set(place), seed)
    names = [name for name in SPLITS if have[name]]
    total = len(place) + len(fresh)
    wanted = {name: have[name] * total / len(place) for name in names}
    sizes = _filled({name: have[name] for name in names}, wanted, total)
    added_sizes = {name: sizes[name] - have[name] for name in names}
    place.update(zip(fresh, _names(added_sizes)))
    dealt = {}
    for name in SPLITS:
        added = [case_id for case_id, patient in new.items() if place[patient] == name]
        dealt[name] = tuple(sorted([*split[name], *added]))
    return dealt


def _filled(sizes: Dict[str, int], wanted: Mapping[str, float], total: int) -> Dict[str, int]:
    """Sizes that grow to a total, each time the one that is furthest behind what is wanted."""
    while sum(sizes.values()) < total:
        behind = {name: wanted[name] - sizes[name] for name in sizes}
        sizes[max(behind, key=behind.__getitem__)] += 1  # of equal ones the first
    return sizes


def _names(sizes: Mapping[str, int]) -> Iterator[str]:
    """Each name as often as its size says."""
    for name, size in sizes.items():
        yield from itertools.repeat(name, size)


# --- Folds that are given ---


@dataclass(frozen=True)
class Splitting:
    """How the cases of a new store are split: as given folds say, else by shares of patients."""

    fractions: Fractions
    seed: int
    folds: Tuple[Split, ...] = ()

    def split(self, patients: Mapping[str, str]) -> Split:
        """The split of these cases (case id -> patient id). Raises InputError as `split_cases`.

        With given folds "val" is what the first one holds out, "train" are the other cases of any
        fold, and "test" is what no fold names: a test case is untouched by every fold.
        """
        if not self.folds:
            return split_cases(patients, fractions=self.fractions, seed=self.seed)
        held_out = set(self.folds[0]["val"])
        named = {case_id for fold in self.folds for side in FOLD_SPLITS for case_id in fold[side]}
        sets = {"train": named - held_out, "val": held_out, "test": set(patients) - named}
        return {name: tuple(sorted(ids & set(patients))) for name, ids in sets.items()}

    @property
    def shares(self) -> Tuple[float, ...]:
        """By which patients are dealt; none of a division that is given."""
        return () if self.folds else tuple(map(float, self.fractions))

    def differs(self, manifest: Manifest, case_ids: Container[str]) -> bool:
        """Whether this is another division of these cases of a store than it has."""
        if not self.folds:
            asked = (self.seed, self.shares)
            return bool(manifest.folds) or asked != (manifest.split_seed, manifest.shares)
        patients = {}
        for record in manifest.cases:
            if record.case_id in case_ids:
                patients[record.case_id] = record.patient_id
        kept = {
            name: tuple(case_id for case_id in ids if case_id in patients)
            for name, ids in manifest.split.items()
        }
        return (self.split(patients), self.folds_of(patients)) != (kept, manifest.folds)

    def folds_of(self, patients: Mapping[str, str]) -> Tuple[Split, ...]:
        """The given folds without the cases that the store lacks; none of a fixed division. Raises
        InputError if that leaves a side empty."""
        folds = []
        problems = []
        for number, named in enumerate(self.folds, 1):
            fold = {}
            for side in FOLD_SPLITS:
                fold[side] = tuple(case_id for case_id in named[side] if case_id in patients)
                if not fold[side]:
                    got = f"bad ones; repair one of {listed(named[side])}"
                    problems.append(f"{side} of fold {number} must have cases, got {got}")
            folds.append(fold)
        raise_if_any(problems)
        return tuple(folds) if len(folds) > 1 else ()


class _Division(msgspec.Struct, forbid_unknown_fields=True):
    """A fold as a file has it, or a fixed division."""

    train: Annotated[List[str], msgspec.Meta(min_length=1)]
    val: Annotated[List[str], msgspec.Meta(min_length=1)]
    test: List[str] = []  # cases that are not named are of it, too


def read_folds(path: Path) -> Tuple[Split, ...]:
    """The folds in a file as nnU-Net's splits_final.json: a list of {"train": [ids], "val": [ids]}.
    A single one, in a list or not, is a fixed division, which may name "test" as well.

    Ids may end in .nii.gz. Raises InputError for other content."""
    try:
        content = read_json(path)
        kind = Annotated[List[_Division], msgspec.Meta(min_length=1)]
        divisions = msgspec.convert([content] if isinstance(content, dict) else content, kind)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        rule = f'--splits {path} must be JSON of folds [{{"train": [ids], "val": [ids]}}, ...], or'
        todo = "write it as nnU-Net's splits_final.json"
        raise InputError(f"{rule} of one such division, got {reason(error)}; {todo}") from None
    folds = []
    for division in divisions:
        fold = {}
        for side in SPLITS:
            ids = getattr(division, side)
            fold[side] = tuple(sorted(stem_of(Path(case_id)) for case_id in ids))
            check_printable(f"--splits {path}", fold[side])
        folds.append(fold)
    return tuple(folds)


def check_folds(
    name: str, folds: Sequence[Split], labelled: Collection[str], bad: Collection[str] = ()
) -> None:
    """Raise InputError with all problems of folds that the source `name` gives: ids that are no
    `labelled` case of the data set, and cases that are twice in a fold or held out by two. `bad`
    are its cases that cannot be used, which may be named too."""
    problems = []
    named = {case_id for fold in folds for ids in fold.values() for case_id in ids}
    for case_id in sorted(named - {*labelled, *bad}):
        rule = f"case {case_id} of {name} must be a case with a label"
        problems.append(f"{rule}, got none of the data set; correct the id or take it out")
    for number, fold in enumerate(folds, 1):
        times = Counter(case_id for ids in fold.values() for case_id in ids)
        rule = f"must be in fold {number} of {name} once"
        problems += [
            f"case {case_id} {rule}, got {n}; keep one"
            for case_id, n in sorted(times.items())
            if n > 1
        ]
    held_out = Counter(case_id for fold in folds for case_id in {*fold["val"]})
    problems += [
        f"case {case_id} must be in val of one fold of {name}, got {n} folds; keep one"
        for case_id, n in sorted(held_out.items())
        if n > 1
    ]
    raise_if_any(problems)


def describe_folds(folds: Sequence[Split], split: Split) -> List[str]:
    """Phrases on the folds that a store was given; none of no folds."""
    if not folds:
        return []
    n = len(folds)
    sizes = ", ".join(f"{len(fold['train'])} + {len(fold['val'])}" for fold in folds)
    lines = [f"{n} given (train + held out): {sizes}; choose one with --fold I/{n}"]
    lines.append("without --fold a run holds out what fold 1 does")
    if split["test"]:
        lines.append(f"{count(split['test'], 'case')} in no fold: the split test")
    return lines
