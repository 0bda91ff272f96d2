"""What changes a finished store: new cases (`append`), another format (`change_format`), more entries of each case.

None of the old cases moves, and what was exact stays exact.
"""

import dataclasses
import functools
from collections import Counter
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple, Union

from cpu3d.data.files.arrays import file_sha256, voxels_sha256
from cpu3d.data.files.reader import Reader
from cpu3d.data.records import CaseRecord, Manifest, remake
from cpu3d.data.region import bounding_box
from cpu3d.data.splits import TABLE, deal_cases, read_patients
from cpu3d.data.store import Store, on_grid, open_store, write_store
from cpu3d.data.stores import conversion
from cpu3d.data.stores.case import LoadedCase, facts_of, float16_image
from cpu3d.data.stores.conversion import FORMAT_CHOICES, Job, claimed, convert_all, settings_of
from cpu3d.data.stores.layouts import CaseFiles, labels_in_use, patient_of, read_dataset, regions_of, with_label_map
from cpu3d.data.stores.verify import ADVICE, OF_ARRAYS
from cpu3d.errors import InputError, refuse
from cpu3d.util.atomic import remove_partials, writable_folder
from cpu3d.util.child import worker_count
from cpu3d.util.lock import locked
from cpu3d.util.records import count, versions


class Appended(NamedTuple):
    """What became of a data set's cases: the store's manifest now, and ids that were new, there, and left out."""

    manifest: Manifest
    new: Tuple[str, ...]
    known: Tuple[str, ...]
    bad: Tuple[str, ...]


def append(
    store_dir: Union[str, Path],
    dataset_dir: Union[str, Path],
    *,
    workers: Optional[int] = None,
    skip_bad: bool = False,
    patients: Optional[Path] = None,
) -> Appended:
    """Add the cases of a data set that a finished store does not have, and say what became of each.

    They are made with the store's own settings: format, crop, NaN and label codes. The split of the old cases stays,
    new ones are dealt by `deal_cases`. The manifest is replaced at the end; the same call continues where one was cut.

    Raises InputError, and leaves the store as it was, when channels or labels differ, when an id is that of a case, or
    of arrays, made from other files, when a patient or identical images would be in two splits, without a table of
    patients where the store has one, and for bad cases unless `skip_bad`. OSError and KeyboardInterrupt as `prepare`.
    """
    workers, store_dir = worker_count(workers), Path(store_dir)
    settings, old = settings_of(store_dir), open_store(store_dir).manifest  # raises unless finished and whole
    dataset = with_label_map(read_dataset(dataset_dir, patients), settings.label_map)
    labels = labels_in_use(dataset.layout, dataset.labels, old.labels)
    for what, value in (("channels", dataset.channels), ("labels", labels), ("regions", regions_of(labels))):
        if getattr(old, what) != value:
            rule = f"data set {dataset.folder} must have the {what} of store {store_dir}, {getattr(old, what)}"
            raise InputError(f"{rule}, got {value}; prepare a store of its own")
    writable_folder(store_dir, "store")
    with locked(store_dir, "store"):
        remove_partials(store_dir, store_dir / "cases")
        store = open_store(store_dir)
        store.check_split()
        old, out = store.manifest, conversion.left_out(store_dir)
        there = {case_id for ids in old.split.values() for case_id in ids}
        known = [files for files in dataset.cases if files.case_id in there]
        new = [files for files in dataset.cases if files.case_id not in there]
        refuse([*_clashes(store, known, new), *(_patient_clashes(store, patients) if new else ())])
        finished = conversion.finished_cases(store_dir, new, dataset.folder, verify=True)
        jobs = conversion.jobs_of(new, dataset, store_dir, settings, finished)
        records, problems = convert_all(jobs, workers, finished, store_dir, "append")
        problems.update((case_id, reasons) for case_id, reasons in dataset.problems.items() if case_id not in there)
        for case_id, record in sorted(records.items()):
            other = ", ".join(f"{one} {dataset.labels[one]}" for one in record.label_voxels if one not in old.labels)
            if other:
                rule = f"label of case {case_id} must hold the store's codes alone, got {other}"
                problems[case_id] = [f"{rule}; prepare a store of its own"]
                del records[case_id]
        if not skip_bad:
            conversion.refuse_bad_cases(dataset.folder, problems, "nothing was appended")
        manifest = old
        if records:
            own = {case.case_id: _patient_of(case, old.layout) for case in old.cases}
            added = {case_id: record.patient_id for case_id, record in records.items()}
            rules = Counter(old.patient_rules)
            rules.update(dataset.patient_rules[case_id] for case_id in records)
            manifest = remake(
                old,
                cases=[*old.cases, *records.values()],
                split=deal_cases(old.split, own, added, seed=old.split_seed),
                versions=versions(),
                patient_rules=dict(rules),
            )
            write_store(store_dir, manifest)
        still_out = {case_id: reasons for case_id, reasons in out.items() if case_id not in {*there, *records}}
        conversion.write_quarantine(store_dir, {**still_out, **problems})
    return Appended(manifest, *(tuple(sorted(ids)) for ids in (records, [one.case_id for one in known], problems)))


def change_format(
    store_dir: Union[str, Path],
    new_dir: Union[str, Path],
    *,
    format: Optional[str] = None,  # noqa: A002
    crop: Optional[bool] = None,
    workers: Optional[int] = None,
) -> Manifest:
    """Write a store's cases into `new_dir` in another format, cropped or not, and return the new store's manifest.

    `format` is one of `FORMAT_CHOICES`; None leaves a setting as it is, and packing leaves float16 float16. The split
    stays, and so does its hash, unless int16 images become float16. The same call continues one that was cut. Raises
    InputError for a way back from float16, for damaged cases (the good ones are kept), and where `new_dir` holds
    anything else. OSError and KeyboardInterrupt as `prepare`.
    """
    workers, store, new_dir = worker_count(workers), open_store(store_dir), Path(new_dir)
    before, old = settings_of(store.folder), store.manifest
    if before.scores and format == "npy":
        rule = f"--format npy must be asked of a store that was never rounded, but {store.folder} holds float16 scores"
        raise InputError(f"{rule}: the source's values are gone; use --format float16, or `prepare` the data set")
    changes = {**FORMAT_CHOICES.get(format, {}), **({} if crop is None else {"crop": crop})}
    settings = dataclasses.replace(before, **changes)
    settings = dataclasses.replace(settings, scores=settings.scores or before.scores)
    store.check_split()
    with claimed(new_dir, "new store", "source.json", conversion.identity(old, settings)):
        if (new_dir / "manifest.json").exists() and open_store(new_dir).manifest.split != old.split:
            raise InputError(f"new store {new_dir} must be of store {store.folder}, got other cases; choose another")
        done, jobs = {}, []
        for stem, record in {record.stem: record for record in old.cases}.items():
            new = conversion.stored_record(new_dir, stem)
            made_of = new and (new.sources, new.label_voxels_sha256) == (record.sources, record.label_voxels_sha256)
            rounded = new and new.image_dtype != record.image_dtype  # so that its voxels are its own
            if made_of and (rounded or new.image_voxels_sha256 == record.image_voxels_sha256):
                done[stem] = new
                continue
            load = functools.partial(_stored_case, store.folder, record, old.channels, settings.scores)
            jobs.append(Job(stem, load, new_dir, settings))
        done, problems = convert_all(jobs, workers, done, new_dir, "convert")
        kept = f"{count(done, 'converted case')} kept in {new_dir}: mend the old store and run the same command again"
        refuse([*(reason for reasons in problems.values() for reason in reasons), kept] if problems else ())
        of_arrays = {stem: {name: getattr(record, name) for name in OF_ARRAYS} for stem, record in done.items()}
        cases = [dataclasses.replace(entry, **of_arrays[entry.stem]) for entry in old.cases]
        manifest = remake(old, cases=cases, versions=versions())
        conversion.write_quarantine(new_dir, conversion.left_out(store.folder))
        write_store(new_dir, manifest)
    return manifest


def repeat_entries(store_dir: Union[str, Path], times: int) -> Manifest:
    """Turn every case `id` of a finished store into the entries `id-000`, `id-001`, ... and return the manifest.

    To measure what grows with the number of cases. The entries of a case share its arrays, its patient and its split.
    Raises InputError while another process writes the store.
    """

    def names(case_id: str) -> List[str]:
        return [f"{case_id}-{number:03d}" for number in range(times)]

    store_dir = Path(store_dir)
    with locked(store_dir, "store"):
        old = open_store(store_dir).manifest
        cases = [dataclasses.replace(case, case_id=name) for case in old.cases for name in names(case.case_id)]
        split = {name: [new for one in ids for new in names(one)] for name, ids in old.split.items()}
        rules = {rule: times * number for rule, number in old.patient_rules.items()}
        manifest = remake(old, cases=cases, split=split, patient_rules=rules)
        write_store(store_dir, manifest)
    return manifest


def _patient_of(case: CaseRecord, layout: str) -> str:
    """As recorded, or by its name where the record is from before names were read in every layout."""
    return case.patient_id if case.patient_id != case.case_id else patient_of(case.case_id, layout)[0]


def _clashes(store: Store, known: Sequence[CaseFiles], new: Sequence[CaseFiles]) -> List[str]:
    """Where a known case was made from other files, by content, as their folder may be another, and where a new case's
    files would replace arrays that entries of other ids share."""
    problems, advice = [], "give it another id, or prepare a new store"
    for files in known:
        made_of = [(source.size_bytes, source.sha256) for source in store.case(files.case_id).sources]
        if made_of != [(path.stat().st_size, file_sha256(path)) for path in files.paths]:
            problems.append(f"case {files.case_id} must be the one of store {store.folder}, got other files; {advice}")
    entry_of = {record.stem: record.case_id for record in store.manifest.cases} if new else {}
    for files in new:
        if files.case_id in entry_of:
            rule = f"case {files.case_id} must have an id that names no arrays of store {store.folder}"
            problems.append(f"{rule}, got that of the arrays of case {entry_of[files.case_id]}; {advice}")
    return problems


def _patient_clashes(store: Store, patients: Optional[Path]) -> List[str]:
    """Where the store's patients come from a table and there is none, or another, for the new cases."""
    old = store.manifest
    if TABLE in old.patient_rules and patients is None:
        return [f"--patients must name a table, as store {store.folder} has its patients from one, got none; name one"]
    problems, table = [], read_patients(patients, ()) if patients is not None else {}
    for case in old.cases if table else ():
        own = _patient_of(case, old.layout)
        if table.get(case.case_id, own) not in (case.patient_id, own):
            rule = f"case {case.case_id} must be of the patient that store {store.folder} has, {own}"
            problems.append(f"{rule}, got {table[case.case_id]}; prepare a new store with this table")
    return problems


def _stored_case(store_dir: Path, record: CaseRecord, channels: Sequence[str], scores: bool) -> LoadedCase:
    """A case as a store has it, as float16 `scores` where they are wanted. Raises InputError for damaged arrays."""
    reader, rule = Reader(store_dir, "pread"), f"case {record.case_id} of store {store_dir} must"
    try:
        image = on_grid(reader.array(record, "x"), record)
        label = on_grid(reader.array(record, "y"), record) if record.has_label else None
    except OSError as error:
        raise InputError(f"{rule} be readable, got {error}; {ADVICE}") from None
    mask = image.any(axis=-1) if label is None else image.any(axis=-1) | (label > 0)
    found = bounding_box(mask), voxels_sha256(image), voxels_sha256(label) if label is not None else ""
    if found != (record.box, record.image_voxels_sha256, record.label_voxels_sha256):
        raise InputError(f"voxels of {rule} be as recorded, got others; {ADVICE}")
    if scores and record.image_dtype == "int16":
        names = [f"channel {name} of {record.case_id}" for name in channels]
        image, error = float16_image([image[..., channel] for channel in range(image.shape[3])], names)
        record = dataclasses.replace(record, max_abs_error=error, **facts_of(image, label))
    return LoadedCase(image, label, record)
