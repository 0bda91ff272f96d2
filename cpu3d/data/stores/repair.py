"""Makes lost files of a finished store again, from the files that its cases were made from.

A case comes back as it was, to the byte; the split, the manifest and their hashes stay, so that
runs go on. The store may have grown from several data sets: each gives back its own cases.
"""

from dataclasses import replace
from pathlib import Path
from typing import List, NamedTuple, Tuple

from cpu3d.data.datasets.dataset import Dataset, Problems
from cpu3d.data.datasets.layouts import ignoring, labels_in_use
from cpu3d.data.files.reader import Reader
from cpu3d.data.manifest import (
    CaseList,
    CaseRecord,
    case_from_json,
    record_path,
    remake,
    to_json,
)
from cpu3d.data.store import RecordsLostError, Store, open_store, restore_records, write_store
from cpu3d.data.stores.convert import Job, StoreSettings, convert_all
from cpu3d.errors import InputError
from cpu3d.util.atomic import write_json
from memory_estimator.common.files import read_regular


class Repaired(NamedTuple):
    """A store after its repair with a data set."""

    store: Store
    case_ids: Tuple[str, ...]  # that had lost files, which are there again
    problems: Problems  # case of the data set that could not be made again -> the reasons why
    elsewhere: Tuple[str, ...]  # damaged cases that the data set does not have

    def lines(self) -> List[str]:
        """All problems, in the order of the cases."""
        return [problem for case_id in sorted(self.problems) for problem in self.problems[case_id]]


def open_mended(store_dir: Path) -> Store:
    """The finished store, whose file of records is made again if it is lost. The caller holds the
    store's lock. Raises InputError as `open_store` and `restore_records`."""
    try:
        return open_store(store_dir)
    except RecordsLostError:
        return restore_records(store_dir)


def repair(store: Store, dataset: Dataset, settings: StoreSettings, workers: int) -> Repaired:
    """Make the cases of `dataset` again whose files in the store are gone, or of another length or
    header.

    The voxels of whole cases are not read. The caller holds the store's lock, and has `fitting`'s
    data set. What was killed is continued by the next call. Raises OSError and KeyboardInterrupt as
    `convert_all`.
    """
    store_dir = store.folder
    (store_dir / "cases").mkdir(exist_ok=True)
    files_of = {files.case_id: files for files in dataset.cases}
    problems: Problems = {}
    jobs: List[Job] = []
    rewritten: List[str] = []
    elsewhere: List[str] = []
    reader = Reader(store_dir, "pread")
    for record in store.manifest.cases:
        files = files_of.get(record.case_id)
        damage = reader.problems(record)
        if damage and files:
            jobs.append(Job(files, record))
        elif damage and record.case_id in dataset.problems:
            problems[record.case_id] = [_source_lost(store_dir, record, dataset)]
        elif damage:
            elsewhere.append(record.case_id)
        elif files and not _has_own_record(store_dir, record.case_id):
            write_json(record_path(store_dir, record.case_id), to_json(record))
            rewritten.append(record.case_id)
    records, bad = convert_all(jobs, dataset, store_dir, settings, workers)
    problems.update(bad)
    store = _with_records(store, records)
    mended = sorted([*(case.case_id for case in records.known), *rewritten])
    return Repaired(store, tuple(mended), problems, tuple(elsewhere))


def fitting(dataset: Dataset, store: Store) -> Dataset:
    """The data set with the channels, by name, the labels and the normalisation that the store has,
    of which the same is ignored, and which has the store's regions whatever its list says. Raises
    InputError for other channels and labels."""
    dataset = dataset.with_channels(store.manifest.channels)
    dataset = replace(dataset, regions=store.manifest.regions, class_order=())
    labels = labels_in_use(dataset.layout, dataset.labels, store.manifest.labels)
    ignore = store.manifest.ignore
    if ignore is not None and ignore in labels:
        dataset = ignoring(dataset, ignore)
    for name, value in (("labels", labels), ("ignore", dataset.ignore)):
        expected = getattr(store.manifest, name)
        if value != expected:
            rule = f"data set {dataset.folder} must have the {name} of store {store.folder}"
            raise InputError(f"{rule}, {expected}, got {value}; prepare a separate store")
    return replace(
        dataset,
        labels=labels,
        normalisation=store.manifest.normalisation,
    )


def _source_lost(store_dir: Path, record: CaseRecord, dataset: Dataset) -> str:
    own = f"case {record.case_id} of store {store_dir}"
    rule = f"{own} must be made again from {len(record.sources)} files"
    got = "; ".join(line.partition("; ")[0] for line in dataset.problems[record.case_id])
    todo = "bring them back, or the store's own files from a copy"
    return f"{rule}, got not all of them: {got}; {todo}"


def _has_own_record(store_dir: Path, case_id: str) -> bool:
    """Whether the case's own file holds a record, which is left alone if it differs from the
    store's."""
    try:
        case_from_json(read_regular(record_path(store_dir, case_id)))
    except (FileNotFoundError, ValueError):
        return False
    return True


def _with_records(store: Store, records: CaseList) -> Store:
    """The store with the records of cases that were made again. They are the old ones, unless
    another version of the packing library wrote other bytes for the same voxels."""
    changed = {record.case_id: record for record in records if record != store.case(record.case_id)}
    if not changed:
        return store
    cases = (changed.get(case.case_id, case) for case in store.manifest.cases)
    write_store(store.folder, remake(store.manifest, cases=CaseList.collected(cases, store.folder)))
    return open_store(store.folder)
