"""Convert a data set of NIfTI volumes into a store, from which training reads at the speed of
memory.

Examples: ./run.sh prepare --dataset Task01_BrainTumour --store store
          ./run.sh prepare --dataset Task01_BrainTumour --store store --spacing 1 1 1
          ./run.sh prepare --dataset Task04_Hippocampus --store store --splits splits_final.json
          ./run.sh prepare --dataset Dataset001_Tumour --store store --regions WT=1,2,3 TC=2,3
          ./run.sh prepare --dataset Task03_Liver --store store --normalise CT=zscore

Each case is written whole or not at all: its record is written after its arrays, and the manifest
of the finished store last. The same command continues after an interruption. source.json names the
data set and the settings, quarantine.jsonl the cases that were left out. A store has cases whose
files give the patient's orientation, or cases whose files do not: those of the smaller group are
bad cases.

Where voxels of the training cases differ by more than 10 % along an axis, all cases are resampled
to the median of their sizes (of thick slices to a fine one, as in nnU-Net). Scores and predictions
are on the images' own grids all the same.
"""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Optional, Tuple, Union

from cpu3d.data.cases.kinds import chosen_kinds
from cpu3d.data.cases.notes import (
    absence_line,
    absent_regions,
    note_lines,
    notes_of_store,
)
from cpu3d.data.cases.resample import (
    Keep,
    in_mm,
    parse_spacing,
    range_in_mm,
    target_spacing,
    voxels_of,
)
from cpu3d.data.datasets.dataset import Dataset, parse_regions, regions_in_words
from cpu3d.data.datasets.layouts import labels_in_use, read_dataset, regions_in
from cpu3d.data.datasets.patients import UNKNOWN, describe_patients
from cpu3d.data.files.reader import choose_read_mode, file_system
from cpu3d.data.labels import (
    PaintedRegions,
    check_painting,
)
from cpu3d.data.manifest import USUAL, Manifest, StoreSettings
from cpu3d.data.split import Split, division_problems
from cpu3d.data.store import Store, open_store
from cpu3d.data.stores.folder import (
    QUARANTINE,
    SOURCE,
    check_same,
    claimed,
    identity,
    read_quarantine,
    settings_of,
)
from cpu3d.data.stores.splits import (
    Fractions,
    Splitting,
    check_folds,
    describe_folds,
    read_folds,
    split_sizes,
)
from cpu3d.data.stores.store_decisions import decided_table
from cpu3d.data.stores.update import check_known, make_store, with_checked_headers
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.child import worker_count
from cpu3d.util.progress import say
from cpu3d.util.records import count
from memory_estimator.common.schema import option
from memory_estimator.common.table import new_console
from memory_estimator.common.units import by, format_bytes
from models.strides import Spacing3

USUAL_SPLIT = (0.8, 0.1, 0.1)  # of the patients, unless a user or folds say others
PATIENTS_HELP = (
    "table of two columns, case and patient (CSV, or with semicolons or tabs), for cases whose"
    " names do not show the patient as BraTS-GLI-00001-000 does; a patient's cases stay in one"
    " split"
)
SPLITS_HELP = (
    "folds as nnU-Net's splits_final.json has them, kept in the store for `train --fold I/K`, or"
    " one division into train and val; cases that are in neither are the split test"
)
WORKERS_HELP = (
    "processes; each holds about two volumes, where it resamples four of the larger grid (default:"
    " one per usable core)"
)
SPACING_HELP = (
    "voxels X Y Z in mm that all cases are resampled to; off: as they are; auto: resampled if those"
    " of the training cases differ by more than 10 % (default: auto)"
)
REGIONS_HELP = (
    "regions to learn, each of one label code or several, as in WT=1,2,3 TC=2,3 (default: those of"
    " the data set's list, else found by the labels' names)"
)
IGNORE_HELP = (
    "label code of voxels that are not annotated: neither learnt nor scored, and never predicted"
    ' (default: that of a label named as such, as "ignore" or "unlabelled")'
)
SKIP_BAD_HELP = "leave out bad cases and list them in quarantine.jsonl"


@dataclass(frozen=True)
class Options:
    """The options of `prepare`."""

    dataset: Path = option(
        help="folder in the layout of the Decathlon, of nnU-Net's raw data or of BraTS, one BraTS"
        " case, or a list of MONAI's, a file .json"
    )
    store: Path = option(help="folder to write; made if absent, continued if unfinished")
    split: Fractions = option(
        USUAL_SPLIT,
        "shares of the patients, in any ratio; for `train --folds` 1 0 0 puts all of them into the"
        " folds, and leaves none for a test split",
        metavar=("TRAIN", "VAL", "TEST"),
        one_of="split",
    )
    splits: Optional[Path] = option(None, SPLITS_HELP, metavar="FILE", one_of="split")
    seed: int = option(0, "seed of the split")
    regions: Tuple[str, ...] = option((), REGIONS_HELP, metavar="NAME=CODE,CODE")
    patients: Optional[Path] = option(None, PATIENTS_HELP, metavar="FILE")
    workers: Optional[int] = option(None, WORKERS_HELP, at_least=1)
    skip_bad: bool = option(False, SKIP_BAD_HELP)
    spacing: Tuple[str, ...] = option((Keep.AUTO.value,), SPACING_HELP, metavar="MM")
    ignore: Optional[int] = option(None, IGNORE_HELP, metavar="CODE", at_least=1, at_most=255)


OPTIONS = (Options, StoreSettings)


def run(options: Options, settings: StoreSettings) -> int:
    prepare(
        options.dataset,
        options.store,
        fractions=options.split,
        splits=options.splits,
        seed=options.seed,
        patients=options.patients,
        workers=options.workers,
        skip_bad=options.skip_bad,
        ignore=options.ignore,
        settings=settings,
        spacing=parse_spacing(options.spacing),
        regions=parse_regions(options.regions),
    )
    return 0


def prepare(
    dataset_dir: Union[str, Path],
    store_dir: Union[str, Path],
    *,
    fractions: Fractions = USUAL_SPLIT,
    seed: int = 0,
    workers: Optional[int] = None,
    skip_bad: bool = False,
    settings: StoreSettings = USUAL,
    patients: Optional[Path] = None,
    splits: Optional[Path] = None,
    spacing: Union[Keep, Spacing3] = Keep.AUTO,
    regions: Optional[Dict[str, Tuple[int, ...]]] = None,
    ignore: Optional[int] = None,
) -> Manifest:
    """Write the store of the data set in `dataset_dir`, print a summary and return its manifest.

    `patients` and `splits` are files as in the options; `splits` takes the place of `fractions`
    and `seed`, and so do folds that the data set's list gives, unless these are chosen. `regions`,
    name -> label codes, take the place of the data set's own. `ignore` is a label code of voxels
    that are not to be learnt. `spacing` in mm takes the place of that in `settings`, as the option
    does.

    A finished store stays as it is; an unfinished one is continued with its own `settings` only.
    Several workers are processes that import the calling script: guard its start with
    `if __name__ == "__main__"`. Raises InputError for bad cases unless `skip_bad`, a bad data set
    or split, and a store of other content or settings; OSError when writing fails, MemoryError when
    a worker was killed, KeyboardInterrupt on Ctrl-C. Finished cases are kept then.
    """
    workers = worker_count(workers)
    store_dir = Path(store_dir)
    dataset = read_dataset(dataset_dir, patients, regions, ignore)
    draws = (fractions, seed) != (USUAL_SPLIT, 0)
    splitting = Splitting(fractions, seed, _folds_of(dataset, splits, seed, draws=draws))
    chosen_kinds(dataset.channels, settings.normalise)  # fail early: nothing is written yet
    regions_found = regions_in(dataset, dataset.labels)
    painted = PaintedRegions(regions_found, zip(regions_found, dataset.class_order))
    check_painting(painted, dataset.labels, f"data set {dataset.folder}")
    is_finished = (store_dir / "manifest.json").exists()
    split: Split = {}
    if not is_finished:  # what names and headers tell is refused before anything is written
        dataset = with_checked_headers(dataset, skip_bad)
        patients_of = {case.case_id: case.patient_id for case in dataset.cases}
        split = splitting.split(patients_of)
        raise_if_any(division_problems(split, splitting.folds_of(patients_of), dataset.cases))
    _announce(dataset)
    settings = _with_spacing(settings, spacing, store_dir, dataset, split)
    if store_dir.resolve() == dataset.folder.resolve():
        rule = f"store {store_dir} must be another folder than the data set"
        raise InputError(f"{rule}, got the same; choose one")
    if is_finished:
        _check_unchanged(dataset, settings, splitting, patients, store_dir)
        say(f"Nothing to do: store {store_dir} is finished and unchanged.", stderr=False)
        return open_store(store_dir).manifest
    with claimed(store_dir, "store", SOURCE, identity(dataset, settings)):
        manifest = make_store(
            store_dir, dataset, settings, splitting, workers=workers, skip_bad=skip_bad
        )
    print_summary(store_dir)
    return manifest


def _folds_of(
    dataset: Dataset, splits: Optional[Path], seed: int, *, draws: bool
) -> Tuple[Split, ...]:
    """The folds of a file for the cases of a data set, else those of its own list unless the user
    `draws` a split."""
    if splits is None:
        if draws:
            return ()
        folds = dataset.folds
        name = f"data set {dataset.folder}"
    else:
        if seed:
            raise InputError(f"--seed must be left out with --splits, got {seed}; nothing is drawn")
        folds = read_folds(splits)
        name = f"--splits {splits}"
    labelled = [case.case_id for case in dataset.cases if case.label]
    check_folds(name, folds, labelled, bad=dataset.problems)
    return folds


def _with_spacing(
    settings: StoreSettings,
    spacing: Union[Keep, Spacing3],
    store_dir: Path,
    dataset: Dataset,
    split: Split,
) -> StoreSettings:
    """The settings with the spacing that cases are resampled to: the chosen one, or that of a store
    that was begun, or what the training cases of a new one tell, which is printed."""
    chosen = None if isinstance(spacing, Keep) else spacing
    begun = settings_of(store_dir)
    if begun:
        if spacing is not Keep.AUTO and chosen != begun.target_spacing_mm:
            rule = f"--spacing must be {in_mm(begun.target_spacing_mm)}, as store {store_dir} was"
            todo = "leave it out, or choose another store"
            raise InputError(f"{rule} begun, got {in_mm(chosen)}; {todo}")
        return replace(settings, target_spacing_mm=begun.target_spacing_mm)
    if spacing is not Keep.AUTO:
        return replace(settings, target_spacing_mm=chosen)
    trained = [files for files in dataset.cases if files.case_id in split["train"]]
    spacings, shapes = voxels_of(trained)
    target = target_spacing(spacings, shapes)
    if target:
        found = f"voxels of training cases have {range_in_mm(spacings)}"
        todo = "--spacing off stores them as they are"
        say(f"Spacing: {found}; all are resampled to {in_mm(target)}; {todo}", stderr=False)
    return replace(settings, target_spacing_mm=target)


def _check_unchanged(
    dataset: Dataset,
    settings: StoreSettings,
    splitting: Splitting,
    patients: Optional[Path],
    store_dir: Path,
) -> None:
    """Raise InputError for damage to a finished store, and for what it would be made of otherwise
    now."""
    store = open_store(store_dir)
    manifest = store.manifest
    begun = identity(manifest, manifest.settings)
    check_same(store_dir, "store", begun, identity(dataset, settings))
    check_known(store, dataset, patients)
    rule = f"store {store_dir} is finished and must keep its content, but"
    own = {record.case_id for record in manifest.cases}
    left_out = read_quarantine(store_dir)
    changes = [
        f"{rule} case {files.case_id} is new"
        for files in dataset.cases
        if files.case_id not in own and files.case_id not in left_out
    ]
    regions = regions_in(dataset, manifest.labels)
    if regions != manifest.regions:
        got = f"{regions_in_words(regions)}, not {regions_in_words(manifest.regions)}"
        changes.append(f"{rule} the regions are now {got}")
    elif tuple(zip(regions, dataset.class_order)) != manifest.paint:
        got = f"{list(dataset.class_order)}, not {[code for _, code in manifest.paint]}"
        changes.append(f"{rule} regions_class_order is now {got}")
    if splitting.differs(manifest, {files.case_id for files in dataset.cases}):
        kept = f"{split_sizes(manifest)}, seed {manifest.split_seed}"
        if manifest.folds:
            kept = f"the {len(manifest.folds)} folds of its --splits"
        changes.append(f"{rule} --splits, --split and --seed ask for another split than {kept}")
    if changes:
        todo = "give another --store for the new content, or add new cases with `store append`"
        raise InputError(*changes, f"{todo}; its content is untouched")


def _announce(dataset: Dataset) -> None:
    """Print the data set's cases, channels, patients and label codes."""
    regions = regions_in(dataset, dataset.labels)
    always = labels_in_use(dataset.layout, dataset.labels, dataset.named_codes)
    facts = f"{count(dataset.cases, 'case')}, layout {dataset.layout}"
    lines = [f"{dataset.name}: {facts}, channels {', '.join(dataset.channels)}"]
    lines.append("Labels and regions:")
    for code, name in sorted(dataset.labels.items()):
        own = ", ".join(region for region, codes in regions.items() if code in codes)
        if code == dataset.ignore:
            own = "not annotated: neither learnt nor scored"
        line = f"  {code} {name} -> {own or 'no region'}"
        if code not in always:
            line += ", if a label holds it"
        lines.append(line)
    lines.append(f"Patients: {len({case.patient_id for case in dataset.cases})}")
    lines += [f"  {rule}" for rule in describe_patients(Counter(dataset.patient_rules.values()))]
    unknown = [name for name, rule in dataset.patient_rules.items() if rule == UNKNOWN]
    if len(unknown) > 1:
        todo = "name them with --patients FILE, or test scores may be too good"
        lines.append(f"  if a patient has several cases, {todo}")
    say(*lines, stderr=False)
    say(*dataset.warnings)


# --- The summary of a store ---


def summary_lines(store: Store) -> List[str]:
    """A summary of a store's records, as lines: what it holds, beside what was decided for it."""
    manifest = store.manifest
    cases = manifest.cases
    size_bytes = 0
    images: Counter[str] = Counter()
    voxels: Counter[int] = Counter()  # of each label code
    for case in cases:
        size_bytes += sum(file.size_bytes for file in case.files.values())
        cropped = " cropped" if case.stored.size != case.shape else ""
        images[f"int16 .{case.format}{cropped}"] += 1
        voxels.update(case.label_voxels)
    drawn = "" if manifest.folds else f", seed {manifest.split_seed}"
    rounding = max(case.max_abs_error for case in cases)
    exact = f"rounded by up to {rounding:.1g} std" if rounding else "exact"
    kinds = ", ".join(f"{n} {image}" for image, n in images.most_common())
    patients = len({case.patient_id for case in cases})
    shapes = Counter(by(case.shape) for case in cases).most_common(6)
    bare = f"{len(manifest.unlabelled)} unlabelled"
    file_system_type = file_system(store.folder)
    lines = {
        "cases": f"{len(cases)} of {count(range(patients), 'patient')}, {bare}",
        "patients": "; ".join(describe_patients(manifest.patient_rules)),
        "split": f"{split_sizes(manifest)}{drawn}, hash {manifest.split_hash}",
        "folds": "; ".join(describe_folds(manifest.folds, manifest.split)),
        "images": f"{kinds}; {exact}",
        "size": f"{format_bytes(size_bytes)} on disk",
        "shapes": ", ".join(f"{shape} ({n})" for shape, n in shapes),
    }
    mode = choose_read_mode(file_system_type)
    lines["read"] = f"with {mode}, from {file_system_type or 'an unknown file system'}"
    for code, name in sorted(manifest.labels.items()):
        share = f"{voxels[code] / max(sum(voxels.values()), 1):.3%} of the voxels"
        with_code = sum(code in case.label_voxels for case in cases)
        lines[f"label {code}"] = f"{name}: {count(with_code, 'case')}, {share}"
    head = f"Store {store.folder}: {manifest.name}, layout {manifest.layout}"
    shown = [f"  {name:<8} {line}" for name, line in lines.items() if line]
    return [head, *shown, *note_lines(notes_of_store(manifest))]


def print_summary(store_dir: Path) -> None:
    """Print the summary of a finished store, the table of what was decided for it, and how many
    cases were left out of it."""
    store = open_store(store_dir)
    say(*summary_lines(store), "", stderr=False)
    new_console().print(decided_table(store))
    regions = store.manifest.regions
    trained = store.cases("train") or store.manifest.cases
    warning = absence_line(absent_regions(trained, regions), regions, f"store {store_dir}")
    if warning:
        say(warning)
    bad = read_quarantine(store_dir)
    if bad:
        left_out = f"  left out {count(bad, 'bad case')}, see {store_dir / QUARANTINE}"
        say(f"{left_out}; add repaired cases with `store append`", stderr=False)
