"""A store that is begun: the kinds of its channels, its cases, the windows of its CT, and then its
manifest."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Set, Tuple

from cpu3d.data.cases.annotated import check_annotated
from cpu3d.data.cases.normalisation import decide, in_window, with_windows
from cpu3d.data.cases.notes import mixed_orientation
from cpu3d.data.datasets.dataset import Dataset, Problems
from cpu3d.data.datasets.layouts import labels_in_use, regions_in
from cpu3d.data.files.reader import Reader
from cpu3d.data.labels import paint_by_order
from cpu3d.data.manifest import (
    CaseList,
    Manifest,
    make_manifest,
    record_path,
    to_json,
)
from cpu3d.data.normalise import if_any_differs
from cpu3d.data.region import xyz
from cpu3d.data.store import write_store
from cpu3d.data.stores.convert import Job, StoreSettings, convert_all, refuse_bad_cases
from cpu3d.data.stores.folder import (
    has_grown,
    normalisation_begun,
    note_no_growth,
    note_normalisation,
    write_quarantine,
)
from cpu3d.data.stores.splits import Splitting
from cpu3d.errors import InputError
from cpu3d.util.atomic import write_json
from cpu3d.util.records import count, versions


def finish(
    store_dir: Path,
    dataset: Dataset,
    settings: StoreSettings,
    workers: int,
    splitting: Splitting,
    skip_bad: bool,
) -> Manifest:
    """Convert the cases that a store does not have yet, and write its manifest, which is returned.
    The caller holds the store's lock. Raises InputError for bad cases unless `skip_bad`, and as
    `convert_all`."""
    dataset = _with_kinds(dataset, store_dir, splitting, settings, workers)
    jobs = [Job(files) for files in dataset.cases]
    records, problems = convert_all(jobs, dataset, store_dir, settings, workers)
    mixed = mixed_orientation(records)
    records = records.without(mixed)
    problems.update({**dataset.problems, **mixed})

    def refuse() -> None:
        if not skip_bad:
            refuse_bad_cases(problems, f"{count(records, 'good case')} kept in {store_dir}")

    refuse()
    dataset, unannotated = _with_windows(dataset, records, splitting, store_dir)
    records = records.without(unannotated)
    problems.update(unannotated)
    refuse()
    boxed = _with_boxes(dataset, records, store_dir)
    manifest = _manifest_of(dataset, boxed, splitting, settings)
    # After all that may be refused: a case whose own file has a box is converted again.
    if boxed is not records:
        for record in boxed:
            write_json(record_path(store_dir, record.case_id), to_json(record))
    write_quarantine(store_dir, problems)
    if has_grown(store_dir):  # its manifest was lost, and what was appended has to come again
        note_no_growth(store_dir)
    write_store(store_dir, manifest)
    return manifest


def _with_kinds(
    dataset: Dataset, store_dir: Path, splitting: Splitting, settings: StoreSettings, workers: int
) -> Dataset:
    """The data set with the kind of normalisation of each channel: as its store was begun, or as is
    decided now by its training cases."""
    begun = normalisation_begun(store_dir)
    if begun is not None:
        return replace(dataset, normalisation=begun)
    split = splitting.split({case.case_id: case.patient_id for case in dataset.cases})
    decided = decide(dataset, split["train"], settings.normalise, workers)
    note_normalisation(store_dir, decided)
    return replace(dataset, normalisation=decided)


def _with_windows(
    dataset: Dataset, records: CaseList, splitting: Splitting, store_dir: Path
) -> Tuple[Dataset, Problems]:
    """The data set with the windows of its CT, by the records of the training cases; and the cases
    with nothing annotated in the boxes that follow, which are not among these."""
    unannotated: Problems = {}
    while True:
        records = records.without(unannotated)
        split = splitting.split({case.case_id: case.patient_id for case in records.known})
        training = records.chosen(split["train"]) if split["train"] else records
        windows = with_windows(dataset.normalisation, dataset.channels, training)
        known = replace(dataset, normalisation=windows)
        more = _unannotated(known, records, store_dir)
        if not more:
            return known, unannotated
        unannotated.update(more)  # without them others may be in training


def _unannotated(dataset: Dataset, records: CaseList, store_dir: Path) -> Problems:
    """The cases whose content box, by the windows of their CT, holds nothing but voxels to be
    ignored."""
    problems: Problems = {}
    ignore = dataset.ignore
    if ignore is None or all(each.low is None for each in dataset.normalisation):
        return problems
    label_of = {files.case_id: files.label for files in dataset.cases}
    reader = Reader(store_dir, "pread")
    for record in records:
        # What is labelled is in the box, and annotated.
        if ignore not in record.label_voxels or not {*record.label_voxels} <= {0, ignore}:
            continue
        box = in_window(record, dataset.normalisation, ignore).box
        ends = zip(box.start, box.stop, record.stored.start)
        slices = xyz(slice(start - first, stop - first) for start, stop, first in ends)
        label = reader.array(record, "y", slices)
        try:
            name = f"label {label_of[record.case_id]}"
            check_annotated(label, ignore, name, "all of the content box")
        except InputError as error:
            problems[record.case_id] = list(error.problems)
    return problems


def _with_boxes(dataset: Dataset, records: CaseList, store_dir: Path) -> CaseList:
    """The records with the boxes that the windows of CT tell; the same list without CT."""
    if all(each.low is None for each in dataset.normalisation):
        return records
    boxed = (in_window(record, dataset.normalisation, dataset.ignore) for record in records)
    return CaseList.collected(boxed, store_dir)


def _manifest_of(
    dataset: Dataset, records: CaseList, splitting: Splitting, settings: StoreSettings
) -> Manifest:
    """The manifest of a new store with these cases, whose split is drawn now."""
    patients_of = {case.case_id: case.patient_id for case in records.known}
    codes: Set[int] = set()
    for record in records:
        codes.update(record.label_voxels)
        if record.resampled_from:  # also those that are too small for its voxels
            codes.update(record.resampled_from.label_voxels)
    named = dataset.named_codes
    if dataset.ignore is not None:
        named.add(dataset.ignore)  # it keeps its name, also if no label holds it
    labels = labels_in_use(dataset.layout, dataset.labels, codes | named)
    regions = regions_in(dataset, labels)
    return make_manifest(
        name=dataset.name,
        layout=dataset.layout,
        channels=dataset.channels,
        labels=labels,
        regions=regions,
        paint=paint_by_order(regions, dataset.class_order),
        ignore=dataset.ignore,
        split=splitting.split(patients_of),
        split_seed=splitting.seed,
        folds=splitting.folds_of(patients_of),
        cases=records,
        versions=versions(),
        patient_rules=Counter(dataset.patient_rules[case_id] for case_id in patients_of),
        target_spacing_mm=settings.target_spacing_mm,
        normalisation=if_any_differs(dataset.normalisation),
    )
