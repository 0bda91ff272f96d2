"""Brings a store up to a data set, whether it is new, unfinished or finished: the one way in which
cases come into a store.

A case that is whole, and of the files that it was made from, is kept; any other is made. Then the
manifest is written, in which known cases stay in their parts of the split.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Container, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from cpu3d.data.cases.case import check_annotated
from cpu3d.data.cases.kinds import decide, in_window, with_windows
from cpu3d.data.cases.notes import mixed_orientation
from cpu3d.data.datasets.dataset import CaseFiles, Dataset, Problems
from cpu3d.data.datasets.layouts import ignoring, labels_in_use, regions_in
from cpu3d.data.datasets.patients import TABLE, read_patients
from cpu3d.data.files.reader import Reader
from cpu3d.data.labels import paint_by_order
from cpu3d.data.manifest import CaseRecord, Manifest, StoreSettings, make_manifest, remake
from cpu3d.data.normalise import if_any_differs
from cpu3d.data.split import Split, SplitCase, division_problems
from cpu3d.data.store import read_manifest, read_records, write_store
from cpu3d.data.stores.convert import Job, convert_all, header_problems, same_sources
from cpu3d.data.stores.folder import (
    begun_normalisation,
    note_normalisation,
    read_quarantine,
    write_quarantine,
)
from cpu3d.data.stores.splits import Splitting, add_to_folds, deal_cases
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.records import count, versions

Records = Dict[str, CaseRecord]  # by case id
Division = Tuple[Split, Tuple[Split, ...]]  # the split, and folds that were given


UNSPLIT = Splitting((1.0, 0.0, 0.0), seed=0)


@dataclass(frozen=True)
class Update:
    """A data set for a store: what is asked for."""

    store_dir: Path
    dataset: Dataset
    settings: StoreSettings
    workers: int
    skip_bad: bool = False
    splitting: Splitting = UNSPLIT  # of a new store; a finished one has its own
    patients: Optional[Path] = None  # the table that the patients of the data set are from
    grows: bool = True  # whether a finished store takes new cases


class Updated(NamedTuple):
    """A store after an update: its manifest before and after, and ids of cases."""

    before: Optional[Manifest]  # of a finished store
    manifest: Manifest
    new: Tuple[str, ...]
    known: Tuple[str, ...]  # of the data set, in the store already, and whole
    repaired: Tuple[str, ...]  # in the store already, with files that were lost and are there again
    bad: Tuple[str, ...]  # of the data set, left out
    elsewhere: Tuple[str, ...]  # in the store, with lost arrays, and not in the data set


def update(asked: Update) -> Updated:
    """Make what the store lacks of the data set, and write its manifest. The caller holds the
    store's lock.

    Raises InputError, and changes nothing but lost files of known cases, if a known case has other
    files or another patient, if a lost one cannot be made again, if a patient or an image would be
    in two parts of the split, and for bad cases unless `skip_bad`; OSError and KeyboardInterrupt as
    `convert_all`. The same call continues."""
    old, records, lost = _opened(asked.store_dir)
    dataset = fitting(asked.dataset, old, asked.store_dir) if old else _with_kinds(asked)
    in_store = {*records, *lost}
    known = [files for files in dataset.cases if files.case_id in in_store]
    new = [files for files in dataset.cases if files.case_id not in in_store]
    damaged = {*lost, *_damaged(asked.store_dir, records.values())}
    if old:
        if not asked.grows:
            _refuse_new(asked, new)
            new = []
        _make_again(asked, dataset, old, known, new, records, lost, damaged)
    bad = {name: lines for name, lines in dataset.problems.items() if name not in in_store}
    added, wrong = _added(asked, dataset, old, records, new)
    bad.update(wrong)
    if not asked.skip_bad:
        refuse_bad_cases(bad, f"{count(added, 'good case')} kept in {asked.store_dir}")
    if old is None:
        manifest, unannotated = _first_manifest(asked, dataset, added)
        bad.update(unannotated)
    elif added:
        manifest = _grown(asked, old, dataset, records, added)
    else:
        manifest = _with_cases(old, records)
    if old is None or asked.grows:
        left_out = {**read_quarantine(asked.store_dir), **bad}
        stored = {record.case_id for record in manifest.cases}
        still_out = {name: left_out[name] for name in left_out if name not in stored}
        write_quarantine(asked.store_dir, still_out)
    if old is None or added or damaged:
        write_store(asked.store_dir, manifest)
    return Updated(
        before=old,
        manifest=manifest,
        new=tuple(sorted(added)),
        known=tuple(files.case_id for files in known if files.case_id not in damaged),
        repaired=tuple(files.case_id for files in known if files.case_id in damaged),
        bad=tuple(sorted(bad)),
        elsewhere=tuple(sorted(damaged - {files.case_id for files in known})),
    )


def with_checked_headers(dataset: Dataset, *, skip_bad: bool, but: Container[str] = ()) -> Dataset:
    """The data set without the cases whose headers show that they cannot be used, cases of `but`
    aside. Raises InputError for them, and for cases without a file, unless `skip_bad`: it is found
    before hours of conversion."""
    problems = dict(dataset.problems)
    for files in dataset.cases:
        wrong = [] if files.case_id in but else header_problems(files, dataset.channels)
        if wrong:
            problems[files.case_id] = wrong
    if not skip_bad:
        bad = {name: lines for name, lines in problems.items() if name not in but}
        refuse_bad_cases(bad, "nothing was converted")
    cases = tuple(files for files in dataset.cases if files.case_id not in problems)
    return replace(dataset, cases=cases, problems=problems)


def refuse_bad_cases(problems: Problems, kept: str) -> None:
    """Raise InputError with all problems of a data set's cases, if any; `kept` are words for the
    cases that stay."""
    if not problems:
        return
    lines = [problem for case_id in sorted(problems) for problem in problems[case_id]]
    rule = f"the data set must be without bad cases, got {count(problems, 'bad case')}"
    todo = "repair the bad cases and run again, or leave them out with --skip-bad"
    raise InputError(*lines, f"{rule}; {kept}: {todo}")


def still_lost(done: Updated, store_dir: Path, dataset_dir: Path) -> List[str]:
    """The warning that a store has lost files of cases that a data set does not have, if any."""
    if not done.elsewhere:
        return []
    got = f"files of {', '.join(done.elsewhere)} are lost or damaged"
    todo = f"run `store append --store {store_dir}` with the data set that has them"
    return [f"warning: {got}, and {dataset_dir} does not have them; {todo}"]


def fitting(dataset: Dataset, manifest: Manifest, store_dir: Path) -> Dataset:
    """The data set with the channels, by name, the labels and the normalisation that the store has,
    of which the same is ignored, and which has the store's regions whatever its list says. Raises
    InputError for other channels and labels."""
    dataset = dataset.with_channels(manifest.channels)
    dataset = replace(dataset, regions=manifest.regions, class_order=())
    labels = labels_in_use(dataset.layout, dataset.labels, manifest.labels)
    if manifest.ignore is not None and manifest.ignore in labels:
        dataset = ignoring(dataset, manifest.ignore)
    for name, value in (("labels", labels), ("ignore", dataset.ignore)):
        expected = getattr(manifest, name)
        if value != expected:
            rule = f"data set {dataset.folder} must have the {name} of store {store_dir}"
            raise InputError(f"{rule}, {expected}, got {value}; prepare a separate store")
    return replace(dataset, labels=labels, normalisation=manifest.normalisation)


# --- Known cases ---


def _opened(store_dir: Path) -> Tuple[Optional[Manifest], Records, Dict[str, str]]:
    """The manifest of a finished store, else None; the records of its cases; and the problems of
    those that are lost."""
    if not (store_dir / "manifest.json").exists():
        return None, {}, {}
    manifest, sums = read_manifest(store_dir)
    return (manifest, *read_records(store_dir, sums))


def _damaged(store_dir: Path, records: Iterable[CaseRecord]) -> List[str]:
    """The cases with an array that is gone, or of another length or header."""
    reader = Reader(store_dir, "pread")
    return [record.case_id for record in records if reader.problems(record)]


def _refuse_new(asked: Update, new: Sequence[CaseFiles]) -> None:
    """Raise InputError for cases that a finished store does not have and did not leave out."""
    rule = f"store {asked.store_dir} is finished and must keep its content"
    todo = f"add it by `store append --store {asked.store_dir} --dataset {asked.dataset.folder}`"
    left_out = read_quarantine(asked.store_dir)
    names = [files.case_id for files in new if files.case_id not in left_out]
    raise_if_any(f"{rule}, but case {name} is new; {todo}" for name in names)


def _make_again(
    asked: Update,
    dataset: Dataset,
    old: Manifest,
    known: Sequence[CaseFiles],
    new: Sequence[CaseFiles],
    records: Records,
    lost: Mapping[str, str],
    damaged: Container[str],
) -> None:
    """Make the damaged ones of known cases again, and put their records among `records`. Raises
    InputError for those that cannot be, and for what forbids to add cases."""
    store_dir = asked.store_dir
    clashes: Dict[str, str] = {}
    for files in known:
        record = records.get(files.case_id)
        if record and not same_sources(files, record):
            rule = f"case {files.case_id} must be the one of store {store_dir}"
            names = ", ".join(path.name for path in files.paths)
            todo = "bring back those it was made from, give it another id, or prepare a new store"
            clashes[files.case_id] = f"{rule}, got other files, {names}; {todo}"
    jobs = [
        Job(files, records.get(files.case_id), is_new=False)
        for files in known
        if files.case_id in damaged and files.case_id not in clashes
    ]
    (store_dir / "cases").mkdir(exist_ok=True)
    made, wrong = convert_all(jobs, dataset, store_dir, asked.settings, asked.workers)
    problems = [*clashes.values()]
    problems += [line for lines in wrong.values() for line in lines]
    for case_id in sorted(dataset.problems):
        if case_id in damaged:
            rule = f"case {case_id} of store {store_dir} must be made again from its files"
            got = "; ".join(line.partition("; ")[0] for line in dataset.problems[case_id])
            todo = "bring them back, or the store's own files from a copy"
            problems.append(f"{rule}, got not all of them: {got}; {todo}")
    problems += [lost[name] for name in lost if name not in {*made, *wrong, *dataset.problems}]
    problems += _patient_clashes(asked, old, records, bool(new or lost))
    if problems:
        raise InputError(*problems, f"no case was added; {count(made, 'lost case')} made again")
    records.update(made)
    again = _with_cases(old, records)
    if remake(again).split_hash != old.split_hash:
        rule = f"{', '.join(sorted(made))} must get back the voxels of store {store_dir}"
        raise InputError(f"{rule}, got others; use the versions in manifest.json")


def _with_cases(manifest: Manifest, records: Records) -> Manifest:
    return replace(manifest, cases=tuple(records[name] for name in sorted(records)))


def _patient_clashes(
    asked: Update, old: Manifest, records: Records, needs_table: bool
) -> List[str]:
    """A line for each known case whose patient in the table is another, or for a table that is
    missing."""
    store = f"store {asked.store_dir}"
    if asked.patients is None:
        if not needs_table or TABLE not in old.patient_rules:
            return []
        rule = f"--patients must be given, as {store} has its patients from a table"
        return [f"{rule}, got none; name one"]
    table = read_patients(asked.patients, ())
    problems = []
    for case_id, record in sorted(records.items()):
        patient = table.get(case_id, record.patient_id)
        if patient != record.patient_id:
            rule = f"case {case_id} must be of the patient that {store} has, {record.patient_id}"
            problems.append(f"{rule}, got {patient}; prepare a new store with this table")
    return problems


# --- New cases ---


def _with_kinds(asked: Update) -> Dataset:
    """The data set with the kind of normalisation of each channel: as its store was begun, or as is
    decided now by its training cases."""
    dataset = asked.dataset
    kinds = begun_normalisation(asked.store_dir)
    if kinds is None:
        split, _ = _divided(asked, None, {}, dataset.cases)
        kinds = decide(dataset, split["train"], asked.settings.normalise, asked.workers)
        note_normalisation(asked.store_dir, kinds)
    return replace(dataset, normalisation=kinds)


def _divided(
    asked: Update, old: Optional[Manifest], records: Records, new: Iterable[SplitCase]
) -> Division:
    """The division of the cases of a store and of new ones."""
    added = {case.case_id: case.patient_id for case in new}
    if old is None:
        return asked.splitting.split(added), asked.splitting.folds_of(added)
    own = {case_id: record.patient_id for case_id, record in records.items()}
    if old.folds:
        return add_to_folds(old.split, old.folds, own, added)
    return deal_cases(old.split, own, added, seed=old.split_seed), ()


def _added(
    asked: Update,
    dataset: Dataset,
    old: Optional[Manifest],
    records: Records,
    new: Sequence[CaseFiles],
) -> Tuple[Records, Problems]:
    """The records of new cases that are good, and the problems of the others. Raises InputError for
    a patient or an image in two parts of the division, as soon as that is known."""
    if not new:
        return {}, {}
    division = _divided(asked, old, records, new)
    raise_if_any(division_problems(*division, [*records.values(), *new]))
    alike: Dict[str, List[CaseRecord]] = defaultdict(list)  # by their voxels
    for record in records.values():
        alike[record.image_voxels_sha256].append(record)

    def check(record: CaseRecord) -> None:
        twins = alike[record.image_voxels_sha256]
        twins.append(record)
        if not asked.skip_bad:  # else bad cases may change the division
            raise_if_any(division_problems(*division, twins))

    jobs = [Job(files) for files in new]
    made, bad = convert_all(jobs, dataset, asked.store_dir, asked.settings, asked.workers, check)
    mixed = mixed_orientation(made.values(), records.values())
    good = {case_id: made[case_id] for case_id in made if case_id not in mixed}
    return good, {**bad, **mixed}


def _grown(
    asked: Update, old: Manifest, dataset: Dataset, records: Records, added: Records
) -> Manifest:
    """The manifest of a finished store with new cases."""
    split, folds = _divided(asked, old, records, added.values())
    rules = Counter(dataset.patient_rules[case_id] for case_id in added)
    return remake(
        old,
        cases=[*records.values(), *added.values()],
        split=split,
        folds=folds,
        versions=versions(),
        patient_rules=dict(Counter(old.patient_rules) + rules),
    )


def _first_manifest(asked: Update, dataset: Dataset, records: Records) -> Tuple[Manifest, Problems]:
    """The manifest of a new store, with the windows of its CT and the boxes that they tell, and the
    cases with nothing annotated in these, which it does not have."""
    unannotated: Problems = {}
    while True:
        split, folds = _divided(asked, None, {}, records.values())
        training = [records[name] for name in split["train"] or records]
        windows = with_windows(dataset.normalisation, dataset.channels, training)
        cases, more = _in_windows(replace(dataset, normalisation=windows), records, asked.store_dir)
        if not more:
            break
        unannotated.update(more)  # without them others may be in training
        records = {name: records[name] for name in records if name not in more}
    if not asked.skip_bad:
        refuse_bad_cases(unannotated, f"{count(records, 'good case')} kept in {asked.store_dir}")
    codes = set(dataset.named_codes)
    for record in cases:
        codes.update(record.label_voxels)
        if record.resampled_from:  # also those that are too small for its voxels
            codes.update(record.resampled_from.label_voxels)
    if dataset.ignore is not None:
        codes.add(dataset.ignore)  # it keeps its name, also if no label holds it
    labels = labels_in_use(dataset.layout, dataset.labels, codes)
    regions = regions_in(dataset, labels)
    manifest = make_manifest(
        name=dataset.name,
        layout=dataset.layout,
        channels=dataset.channels,
        labels=labels,
        regions=regions,
        paint=paint_by_order(regions, dataset.class_order),
        ignore=dataset.ignore,
        split=split,
        split_seed=asked.splitting.seed,
        shares=asked.splitting.shares,
        folds=folds,
        cases=cases,
        versions=versions(),
        patient_rules=dict(Counter(dataset.patient_rules[case_id] for case_id in records)),
        settings=asked.settings,
        normalisation=if_any_differs(windows),
    )
    return manifest, unannotated


def _in_windows(
    dataset: Dataset, records: Records, store_dir: Path
) -> Tuple[List[CaseRecord], Problems]:
    """Return the records with the boxes that the windows of CT tell, and the problems of cases with
    nothing annotated in theirs."""
    if all(each.low is None for each in dataset.normalisation):
        return list(records.values()), {}
    label_of = {files.case_id: files.label for files in dataset.cases}
    reader = Reader(store_dir, "pread")
    cases = []
    problems: Problems = {}
    for case_id, record in records.items():
        image = reader.array(record, "x")
        label = reader.array(record, "y") if record.has_label else None
        record = in_window(record, image, label, dataset.normalisation, dataset.ignore)
        cases.append(record)
        if label is None or dataset.ignore is None:
            continue
        try:
            in_box = label[record.box.slices(record.shape)]
            name = f"label {label_of[case_id]}"
            check_annotated(in_box, dataset.ignore, name, "all of the content box")
        except InputError as error:
            problems[case_id] = list(error.problems)
    return cases, problems
