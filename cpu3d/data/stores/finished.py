"""A finished store and the data set that it is prepared from again: what would change, and what the
data set cannot give back."""

from pathlib import Path
from typing import Container, Dict, List, Mapping, Sequence

from cpu3d.data.datasets.dataset import Dataset, regions_in_words
from cpu3d.data.datasets.layouts import regions_in
from cpu3d.data.labels import paint_by_order, painting_in_words
from cpu3d.data.manifest import Manifest, case_list
from cpu3d.data.split import SPLITS
from cpu3d.data.stores.convert import same_sources
from cpu3d.data.stores.folder import has_grown, read_quarantine
from cpu3d.data.stores.splits import Splitting, split_sizes
from cpu3d.errors import InputError


def still_lost(store_dir: Path, dataset_dir: Path, case_ids: Sequence[str]) -> List[str]:
    """The warning that a store has lost files of cases that a data set does not have; none of no
    cases."""
    if not case_ids:
        return []
    got = f"files of {', '.join(case_ids)} are lost or damaged"
    todo = f"run `store append --store {store_dir}` with the data set that has them"
    return [f"warning: {got}, and {dataset_dir} does not have them; {todo}"]


def differences(
    store_dir: Path,
    old: Manifest,
    dataset: Dataset,
    splitting: Splitting,
    but: Container[str],
) -> List[str]:
    """A line for everything that this run would change in the content of a finished store; cases of
    `but` aside."""
    rule = f"store {store_dir} is finished and must keep its content, but"
    files_of = {files.case_id: files for files in dataset.cases}
    patients: Dict[str, str] = {}
    absent = set()
    changes = []
    for record in old.cases:
        case_id = record.case_id
        files = files_of.pop(case_id, None)
        patients[case_id] = record.patient_id
        if files is None:
            absent.add(case_id)
        elif files.patient_id != record.patient_id:
            got = f"{record.patient_id} and not {files.patient_id}"
            changes.append(f"{rule} case {case_id} is of patient {got}")
        elif case_id not in but and not same_sources(files, record):
            changes.append(f"{rule} the source of case {case_id} has changed")
    regions = regions_in(dataset, old.labels)
    if regions != old.regions:
        got = f"{regions_in_words(regions)}, not {regions_in_words(old.regions)}"
        changes.append(f"{rule} the regions are now {got}")
    elif paint_by_order(regions, dataset.class_order) != old.paint:
        kept = painting_in_words(old.regions, old.paint)
        got = f"{list(dataset.class_order) or 'none'}, not one that paints {kept}"
        changes.append(f"{rule} regions_class_order is now {got}")
    left_out = read_quarantine(store_dir)
    new = [case_id for case_id in files_of if case_id not in left_out]
    changes += [f"{rule} case {case_id} is new in {dataset.folder}" for case_id in new]
    own = {case_id: patient for case_id, patient in patients.items() if case_id not in absent}
    if has_grown(store_dir) or _holds_split_of(old, own, splitting):
        # The other cases are of other data sets, and the split is from before they came.
        return changes
    for case_id in sorted(absent):
        if case_id not in but:
            changes.append(f"{rule} case {case_id} is no longer whole in {dataset.folder}")
    return changes + _split_changes(rule, old, patients, splitting)


def _split_changes(
    rule: str, old: Manifest, patients: Mapping[str, str], splitting: Splitting
) -> List[str]:
    """The line for another split, or other folds, than those of a store; none for the same."""
    kept = f"{split_sizes(old)}, seed {old.split_seed}"
    if old.folds or splitting.folds:
        asked = (splitting.split(patients), splitting.folds_of(patients))
        if asked != (old.split, old.folds):
            wanted = kept
            if old.folds:
                wanted = f"the {len(old.folds)} folds of its --splits"
            return [f"{rule} --splits or --split asks for others than {wanted}"]
    elif splitting.seed != old.split_seed or splitting.split(patients) != old.split:
        return [f"{rule} --split and --seed ask for another split than {kept}"]
    return []


def _holds_split_of(old: Manifest, own: Mapping[str, str], splitting: Splitting) -> bool:
    """Whether a store has grown from one of the cases `own`, case id -> patient, whose split it
    still holds.

    Of a store that grew before source.json held that this is the only trace.
    """
    if not 0 < len(own) < len(old.cases) or splitting.seed != old.split_seed:
        return False
    everyone = {case.case_id: case.patient_id for case in case_list(old.cases).known}
    if splitting.split(everyone) == old.split:
        return False
    held = {}
    for name in SPLITS:
        held[name] = tuple(case_id for case_id in old.split[name] if case_id in own)
    try:
        return splitting.split(own) == held
    except InputError:  # fewer patients than splits
        return False
