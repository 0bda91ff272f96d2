"""The patients of cases, and the split of their cases into training, validation and testing.

A patient's cases stay in one split, and in one part of a fold. Patients are dealt out in the order
of the SHA-256 of "seed:patient", which is the same in every version of every library. Folds may
also be given, as nnU-Net writes them into splits_final.json; the store keeps them."""

import csv
import hashlib
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Collection, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from cpu3d.data.records import FOLD_PARTS, SPLITS, case_list, split_problems
from cpu3d.data.store import Store
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.records import count, listed
from memory_estimator.common.files import NotRegularError, read_json, read_text, reason

Split = Dict[str, Tuple[str, ...]]
Fractions = Tuple[float, float, float]

TABLE = "table"  # the rule for a patient that a table names


def read_patients(path: Path, case_ids: Collection[str]) -> Dict[str, str]:
    """Case id -> patient from all lines of a table of two columns, separated by commas, semicolons
    or tabs.

    Raises InputError for a file that cannot be read, lines that are no pair, a case with two
    patients, and ids of `case_ids` without a patient."""
    name = f"--patients {path}"
    try:
        lines = read_text(path).splitlines()
        delimiter = next((mark for mark in "\t;" if any(mark in line for line in lines)), ",")
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter)]
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"{name} must be a table in UTF-8 that can be read, got {reason}; correct it"
        ) from None
    patients: Dict[str, str] = {}
    problems = []
    for number, row in enumerate(rows, 1):
        if any(row) and (len(row) != 2 or not all(row)):
            problems.append(
                f"{name}:{number} must be a case and its patient, got {row}; correct the line"
            )
        elif any(row) and patients.setdefault(*row) != row[1]:
            problems.append(
                f"{name}:{number} must give case {row[0]} one patient, got {row[1]} too; keep one"
            )
    lacking = sorted(set(case_ids) - set(patients)) if not problems else ()
    raise_if_any(
        [
            *problems,
            *(
                f"{name} must give case {case_id} a patient, got none; add a line"
                for case_id in lacking
            ),
        ]
    )
    return patients


def describe_patients(rules: Mapping[str, int]) -> List[str]:
    """Lines such as "3 cases: table". `rules`: rule that tells a case's patient -> number of
    cases."""
    return [f"{count(number, 'case')}: {rule}" for rule, number in rules.items()]


def split_cases(patients: Mapping[str, str], *, fractions: Fractions, seed: int) -> Split:
    """Deal the patients' cases to "train", "val" and "test" in the ratio of `fractions`; ids come
    back sorted.

    `patients` maps case id -> patient id. Every split with a fraction above 0 gets a patient, then
    always the split furthest behind its share. Whole numbers are a ratio; fractions sum to 1 or
    100, but for their rounding. Raises InputError for bad shares or too few patients."""
    total = sum(fractions)
    if min(fractions) < 0 or not 0 < total < math.inf:
        raise InputError(
            f"--split must be three shares of at least 0, not all 0, got {fractions}; try --split 8 1 1"
        )
    has_fractions = any(share != int(share) for share in fractions)
    if has_fractions and not any(math.isclose(total, whole, rel_tol=0.011) for whole in (1, 100)):
        words = " ".join(f"{share:g}" for share in fractions)
        rule = f"--split with fractions must sum to 1, or to 100 in percent, got {words}, which"
        raise InputError(f"{rule} sum to {total:g}; correct one, or give a ratio in whole numbers")
    order = _dealing_order(patients.values(), seed)
    sizes = [int(fraction > 0) for fraction in fractions]
    if len(order) < sum(sizes):
        rule = f"--split {' '.join(f'{share:g}' for share in fractions)} must have at least {sum(sizes)} patients"
        raise InputError(
            f"{rule}, got {len(order)}; add cases, name --patients, or train on all with --split 1 0 0"
        )
    while sum(sizes) < len(order):
        wanted = [
            (share > 0, share / total * len(order) - size) for share, size in zip(fractions, sizes)
        ]
        sizes[wanted.index(max(wanted))] += 1
    place = dict(zip(order, (name for name, size in zip(SPLITS, sizes) for _ in range(size))))
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
    fresh = _dealing_order(set(new.values()) - set(place), seed)
    counts, total = dict(have), len(place) + len(fresh)
    for _ in fresh:
        behind = max(
            have,
            key=lambda name: (have[name] * total / len(place) - counts[name], -SPLITS.index(name)),
        )
        counts[behind] += 1
    place.update(
        zip(fresh, (name for name in SPLITS for _ in range(counts.get(name, 0) - have[name])))
    )
    return {
        name: tuple(
            sorted(
                [
                    *split[name],
                    *(case_id for case_id, patient in new.items() if place[patient] == name),
                ]
            )
        )
        for name in SPLITS
    }


def parse_fold(fold: str) -> Tuple[int, int]:
    """ "2/5" as (2, 5): the second of five parts. Raises InputError for other text."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})", fold)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= part <= parts or parts < 2:
        raise InputError(
            f"fold must be I/K with 1 <= I <= K and K >= 2, got {fold}; 1/5 holds out the first of five"
        )
    return part, parts


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
        named = {case_id for fold in self.folds for part in FOLD_PARTS for case_id in fold[part]}
        parts = {"train": named - held_out, "val": held_out, "test": set(patients) - named}
        return {name: tuple(sorted(ids & set(patients))) for name, ids in parts.items()}

    def folds_of(self, patients: Mapping[str, str]) -> Tuple[Split, ...]:
        """The given folds without the cases that the store lacks. Raises InputError if that leaves
        a part empty."""
        folds = []
        problems = []
        for number, named in enumerate(self.folds, 1):
            fold = {part: tuple(filter(patients.__contains__, named[part])) for part in FOLD_PARTS}
            for part in FOLD_PARTS:
                if not fold[part]:
                    got = f"bad ones; repair one of {listed(named[part])}"
                    problems.append(f"{part} of fold {number} must have cases, got {got}")
            folds.append(fold)
        raise_if_any(problems)
        return tuple(folds)


def read_folds(
    path: Path,
    patients: Mapping[str, str],
    *,
    unlabelled: Collection[str] = (),
    bad: Collection[str] = (),
) -> Tuple[Split, ...]:
    """The folds in a file as nnU-Net's splits_final.json: a list of {"train": [ids], "val": [ids]}.

    Ids may end in .nii.gz. `patients` maps the id of each good case of the data set to its patient;
    `bad` are its other cases, which may be named too.

    Raises InputError with all problems: a file of another kind, fewer than two folds, an empty
    part, ids that are no labelled case of the data set, a case twice in a fold or held out by two
    folds, a patient in both parts of a fold, or in a fold while another of its cases is in none.
    """
    name = f"--splits {path}"
    try:
        content = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{name} must be a file, got none there; correct the path") from None
    except NotRegularError as error:
        raise InputError(f"{name} must be a file, got {error.strerror}; name the file") from None
    except (OSError, ValueError) as error:
        got = reason(error)
        raise InputError(f"{name} must be JSON that can be read, got {got}; correct it") from None
    if not isinstance(content, list) or len(content) < 2:
        got = count(content, "fold") if isinstance(content, list) else f"a {type(content).__name__}"
        rule = f'{name} must be a list of at least two folds {{"train": [ids], "val": [ids]}}'
        raise InputError(f"{rule}, got {got}; write one as nnU-Net's splits_final.json")
    read = [_read_fold(f"fold {number} of {name}", fold) for number, fold in enumerate(content, 1)]
    raise_if_any(problem for _, problems in read for problem in problems)
    folds = tuple(fold for fold, _ in read)
    raise_if_any(_fold_problems(name, folds, patients, unlabelled, bad))
    return folds


def _read_fold(name: str, content: Any) -> Tuple[Split, List[str]]:
    """A fold of the file, and what is wrong with it alone."""
    fold: Split = {}
    problems = []
    for part in FOLD_PARTS:
        ids = content.get(part) if isinstance(content, dict) else None
        is_list = isinstance(ids, list)
        numbers = [case_id for case_id in ids if type(case_id) in (int, float)] if is_list else []
        if numbers:
            rule = f"case ids in {part} of {name} must be text in quotation marks"
            todo = f'write "{numbers[0]}", with any zeros in front that the files\' names have'
            problems.append(f"{rule}, got {count(numbers, 'number')}: {numbers[0]}; {todo}")
            continue
        if not ids or not is_list or not all(isinstance(case_id, str) for case_id in ids):
            rule = f"{part} of {name} must be a list of at least one case id"
            problems.append(f"{rule}, got {ids!r:.60}; correct it")
            continue
        fold[part] = tuple(sorted(re.sub(r"\.nii(\.gz)?\Z", "", case_id) for case_id in ids))
    if not problems:
        times = Counter(case_id for part in FOLD_PARTS for case_id in fold[part])
        for case_id in sorted(case_id for case_id in times if times[case_id] > 1):
            places = listed(part for part in FOLD_PARTS for own in fold[part] if own == case_id)
            problems.append(f"case {case_id} must be in {name} once, got {places}; keep one")
    return fold, problems


def _fold_problems(
    name: str,
    folds: Sequence[Split],
    patients: Mapping[str, str],
    unlabelled: Collection[str],
    bad: Collection[str],
) -> List[str]:
    """What is wrong with folds beside the data set and each other."""
    named = {case_id for fold in folds for part in FOLD_PARTS for case_id in fold[part]}
    problems = []
    for case_id in sorted(named):
        own = f"case {case_id} of {name}"
        if case_id in unlabelled:
            problems.append(f"{own} must have a label, got none; take it out of the folds")
        elif case_id not in patients and case_id not in bad:
            problems.append(f"{own} must be in the data set, got no such case; correct the id")
    holders: Dict[str, List[int]] = defaultdict(list)
    for number, fold in enumerate(folds, 1):
        for case_id in fold["val"]:
            holders[case_id].append(number)
        trained = {patients[case_id]: case_id for case_id in fold["train"] if case_id in patients}
        for case_id in fold["val"]:
            patient = patients.get(case_id)
            if patient in trained and trained[patient] != case_id:
                rule = f"patient {patient} must be in one part of fold {number} of {name}"
                both = f"{trained[patient]} in train and {case_id} in val"
                problems.append(f"{rule}, got {both}; move one")
    for case_id, numbers in sorted(holders.items()):
        if len(numbers) > 1:
            rule = f"case {case_id} must be held out by one fold of {name}"
            problems.append(f"{rule}, got {listed(numbers)}; keep it in val of one")
    of_folds = {patients[case_id] for case_id in named if case_id in patients}
    for case_id in sorted(set(patients) - named):
        if patients[case_id] in of_folds:
            rule = f"case {case_id}, in no fold of {name}, must be of no patient who is in one"
            todo = "add it to the folds, or take it out of the data set"
            problems.append(f"{rule}, got {patients[case_id]}; {todo}")
    return problems


def describe_folds(folds: Sequence[Split], split: Split) -> List[str]:
    """Phrases on the folds that a store was given; none of no folds."""
    if not folds:
        return []
    parts = len(folds)
    sizes = ", ".join(f"{len(fold['train'])} + {len(fold['val'])}" for fold in folds)
    lines = [f"{parts} given (train + held out): {sizes}; choose one with --fold I/{parts}"]
    lines.append("without --fold a run holds out what fold 1 does")
    held_out = {case_id for fold in folds for case_id in fold["val"]}
    never = len({*split["train"], *split["val"]} - held_out)
    if never:
        lines.append(f"{count(never, 'case')} held out by no fold")
    if split["test"]:
        lines.append(f"{count(split['test'], 'case')} in no fold: the split test")
    return lines


def add_to_folds(
    split: Split, folds: Sequence[Split], patients: Mapping[str, str], new: Mapping[str, str]
) -> Tuple[Split, Tuple[Split, ...]]:
    """The split and the given folds with the new cases in them. `patients` and `new` map case id
    -> patient id.

    A case of a known patient goes where that patient's cases are; every fold trains on the others,
    and none holds them out.
    """
    known = set(patients.values())

    def grown(parts: Split) -> Split:
        place = {patients[case_id]: name for name in parts for case_id in parts[name]}
        added: Dict[Optional[str], List[str]] = defaultdict(list)
        for case_id, patient in new.items():
            added[place.get(patient) if patient in known else "train"].append(case_id)
        return {name: tuple(sorted([*ids, *added[name]])) for name, ids in parts.items()}

    return grown(split), tuple(map(grown, folds))


# --- Views of a store ---


def with_fold(store: Store, fold: str) -> Store:
    """The view of the store for a run of `fold`; "" is the store itself. Raises InputError as
    `with_folds`."""
    return with_folds(store, [fold]) if fold else store


def with_folds(store: Store, folds: Sequence[str]) -> Store:
    """A view of the store with the parts of `folds` of its training and validation cases in "val",
    the rest in "train". Cases without a label, which can be neither trained nor scored on, are in
    neither.

    Of a store with given folds "train" are the cases that all of `folds` train on. Test cases and
    split hash stay. Raises InputError for text that is no fold, for more parts than patients or
    other parts than were given, and if identical images would be in two splits.
    """
    manifest = store.manifest
    if manifest.folds:
        return store.with_split(_given(store, folds))
    own = {*manifest.split["train"], *manifest.split["val"]} - set(manifest.unlabelled)
    known = list(case_list(manifest.cases).known)
    patients = {case.case_id: case.patient_id for case in known if case.case_id in own}
    held_out = {
        case_id for fold in folds for case_id in deal(patients, fold, seed=manifest.split_seed)
    }
    split = {
        "train": tuple(sorted(own - held_out)),
        "val": tuple(sorted(held_out)),
        "test": manifest.split["test"],
    }
    raise_if_any(split_problems(split, known))
    return store.with_split(split)


def _given(store: Store, folds: Sequence[str]) -> Split:
    """The split of a view of given folds, which were checked when the store was made. Unlabelled
    cases, which `store append` may have added, are left out."""
    kept = store.manifest.folds
    parts_given = len(kept)
    chosen = []
    for fold in folds:
        part, parts = parse_fold(fold)
        if parts != parts_given:
            rule = f"fold must be one of the {parts_given} that store {store.folder} was given"
            raise InputError(f"{rule}, got {fold}; choose I/{parts_given}")
        chosen.append(kept[part - 1])
    train = set.intersection(*(set(fold["train"]) for fold in chosen))
    held_out = {case_id for fold in chosen for case_id in fold["val"]}
    bare = set(store.manifest.unlabelled)
    view = {"train": train - bare, "val": held_out - bare, "test": store.manifest.split["test"]}
    return {name: tuple(sorted(ids)) for name, ids in view.items()}


def deal(patients: Mapping[str, str], fold: str, *, seed: int) -> Tuple[str, ...]:
    """The cases that `fold` holds out, sorted; parts differ by at most one patient."""
    part, parts = parse_fold(fold)
    order = _dealing_order(patients.values(), seed)
    if parts > len(order):
        rule = f"fold must have at most as many parts as there are patients to train and validate on, {len(order)}"
        raise InputError(f"{rule}, got {fold}; use fewer parts")
    chosen = set(order[part - 1 :: parts])
    return tuple(sorted(case_id for case_id, patient in patients.items() if patient in chosen))


def _dealing_order(patients: Iterable[str], seed: int) -> List[str]:
    return sorted(
        set(patients), key=lambda patient: hashlib.sha256(f"{seed}:{patient}".encode()).hexdigest()
    )
