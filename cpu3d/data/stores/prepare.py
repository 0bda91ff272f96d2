"""Turn a data set of NIfTI volumes into a store that trains at the speed of memory.

Example: ./run.sh prepare --dataset Task01_BrainTumour --store store

Cases are converted in parallel and each is written whole or not at all. A run that was cut, by Ctrl-C, a full disk or a
lost machine, is continued by the same command; the manifest comes last and marks the store as finished.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Mapping, Optional, Tuple, Union

from cpu3d.data.files.arrays import FORMATS
from cpu3d.data.records import SPLITS, CaseRecord, Manifest, make_manifest, remake
from cpu3d.data.splits import Split, describe_patients, split_cases
from cpu3d.data.store import open_store, write_store
from cpu3d.data.stores.conversion import (
    USUAL,
    Settings,
    claimed,
    convert_all,
    finished_cases,
    identity,
    read_quarantine,
    refuse_bad_cases,
    same_sources,
    write_quarantine,
)
from cpu3d.data.stores.layouts import (
    UNKNOWN,
    Dataset,
    Problems,
    labels_in_use,
    parse_label_map,
    read_dataset,
    regions_of,
    with_label_map,
)
from cpu3d.data.stores.verify import describe
from cpu3d.errors import InputError, refuse
from cpu3d.util.child import worker_count
from cpu3d.util.records import count, versions
from memory_estimator.common.schema import option
from memory_estimator.host import read_host

Fractions = Tuple[float, float, float]

PATIENTS_HELP = (
    "table of two columns, case and patient (CSV, or with semicolons or tabs), where names such as BraTS-GLI-00001-000"
    " do not tell the patient; a patient's cases stay in one split"
)
WORKERS_HELP = "processes; each holds about two volumes (default: one per usable core)"
SKIP_BAD_HELP = "leave bad cases out and list them in quarantine.jsonl"


@dataclass(frozen=True)
class Options:
    """What `prepare` takes."""

    dataset: Path = option(help="folder in Decathlon or BraTS layout, or one BraTS case")
    store: Path = option(help="folder to write; made if absent, continued if unfinished")
    split: Fractions = option((0.8, 0.1, 0.1), "shares of the patients", metavar=("TRAIN", "VAL", "TEST"))
    seed: int = option(0, "of the split")
    patients: Optional[Path] = option(None, PATIENTS_HELP, metavar="FILE")
    format: str = option(
        "npy",
        "npy: int16 where exact, else float16 z-scores, read without unpacking; b2nd: the same packed to a tenth,"
        " for slow disks and networks",
        choices=FORMATS,
    )
    crop: bool = option(False, "store each brain's box only; what is outside is 0")
    zero_nan: bool = option(False, "make NaN and infinite voxels background, and count them")
    label_map: Tuple[str, ...] = option(
        (), "label codes to change while reading, such as 4=3 for BraTS 2021 in the codes of 2023", metavar="OLD=NEW"
    )
    workers: Optional[int] = option(None, WORKERS_HELP, at_least=1)
    skip_bad: bool = option(False, SKIP_BAD_HELP)
    verify: bool = option(False, "check finished cases by hash, not only by size and date")


OPTIONS = (Options,)


def run(options: Options) -> int:
    prepare(
        options.dataset,
        options.store,
        fractions=options.split,
        seed=options.seed,
        workers=options.workers,
        skip_bad=options.skip_bad,
        verify=options.verify,
        settings=Settings(options.format, options.crop, options.zero_nan, parse_label_map(options.label_map)),
        patients=options.patients,
    )
    return 0


def prepare(
    dataset_dir: Union[str, Path],
    store_dir: Union[str, Path],
    *,
    fractions: Fractions = (0.8, 0.1, 0.1),
    seed: int = 0,
    workers: Optional[int] = None,
    skip_bad: bool = False,
    verify: bool = False,
    settings: Settings = USUAL,
    patients: Optional[Path] = None,
) -> Manifest:
    """Write the store of the data set in `dataset_dir`, print a summary and return its manifest.

    A finished case is not converted again while it and its sources are as recorded: by size and date, or by hash with
    `verify`. A store is continued with its own `settings` only. `patients` is a table of the cases' patients, else
    their names tell them. More than one worker means processes that import the calling script: guard its start with
    `if __name__ == "__main__"`.

    Raises InputError when cases are bad (the good ones are kept, the manifest is not written) unless `skip_bad`, for a
    bad data set or split, identical images in two splits, and a store of other content or settings; OSError when
    writing fails, as on a full disk, and KeyboardInterrupt on Ctrl-C. Finished cases are kept then.
    """
    workers, store_dir = worker_count(workers), Path(store_dir)
    in_files = read_dataset(dataset_dir, patients)
    dataset = with_label_map(in_files, settings.label_map)
    _announce(dataset, settings, in_files.labels)
    _split({case.case_id: case.patient_id for case in dataset.cases}, fractions, seed, dataset.problems)  # fail early
    if store_dir.resolve() == dataset.folder.resolve():
        raise InputError(f"store {store_dir} must be another folder than the data set; choose one")
    with claimed(store_dir, "store", "source.json", identity(dataset, settings)):
        if (store_dir / "manifest.json").exists():
            old = open_store(store_dir).manifest
            _refuse_other_content(store_dir, old, dataset, fractions, seed, verify)
            manifest = _repaired(store_dir, old, dataset, settings, workers, verify)
            if manifest is old:
                print(f"Nothing to do: store {store_dir} is finished and unchanged.")
                return old
        else:
            finished = finished_cases(store_dir, dataset.cases, dataset.folder, verify)
            records, problems = convert_all(dataset.cases, dataset, store_dir, settings, workers, finished)
            problems.update(dataset.problems)
            if not skip_bad:
                refuse_bad_cases(problems, f"{count(records, 'good case')} kept in {store_dir}")
            patients_of = {case_id: record.patient_id for case_id, record in records.items()}
            manifest = _new_manifest(dataset, records, _split(patients_of, fractions, seed, problems), seed)
            write_quarantine(store_dir, problems)
        write_store(store_dir, manifest)
    summarise(store_dir)
    return manifest


def _repaired(
    store_dir: Path, old: Manifest, dataset: Dataset, settings: Settings, workers: int, verify: bool
) -> Manifest:
    """The manifest of a finished store after its damaged cases were made again; `old` itself where none is damaged."""
    own = {case.case_id: case.patient_id for case in old.cases}
    cases = [replace(files, patient_id=own[files.case_id]) for files in dataset.cases if files.case_id in own]
    finished = finished_cases(store_dir, cases, dataset.folder, verify)
    if len(finished) == len(old.cases):
        return old
    records, problems = convert_all(cases, dataset, store_dir, settings, workers, finished)
    refuse_bad_cases(problems, f"{count(records, 'good case')} kept in {store_dir}")
    manifest = remake(old, cases=list(records.values()))
    if manifest.split_hash != old.split_hash:  # of the voxels: other versions may pack them into other files
        rule = f"the damaged cases of {store_dir} must get back the voxels that they had"
        raise InputError(f"{rule}, got others; use the versions in manifest.json")
    return manifest


def _new_manifest(dataset: Dataset, records: Mapping[str, CaseRecord], split: Split, seed: int) -> Manifest:
    labels = labels_in_use(
        dataset.layout, dataset.labels, {code for one in records.values() for code in one.label_voxels}
    )
    return make_manifest(
        name=dataset.name,
        layout=dataset.layout,
        channels=dataset.channels,
        labels=labels,
        regions=regions_of(labels),
        split=split,
        split_seed=seed,
        cases=list(records.values()),
        versions=versions(),
        patient_rules=Counter(dataset.patient_rules[case_id] for case_id in sorted(records)),
    )


def summarise(store_dir: Path) -> None:
    """Print the summary of a finished store, and how many cases were left out of it."""
    print(*describe(open_store(store_dir), free_bytes=read_host().free_bytes), sep="\n")
    bad = read_quarantine(store_dir)
    if bad:
        path = store_dir / "quarantine.jsonl"
        print(f"  left out {count(bad, 'bad case')}, see {path}; once repaired they can be added with `store append`")


def split_sizes(manifest: Manifest) -> str:
    """Such as "8 train, 1 val, 1 test"."""
    return ", ".join(f"{len(manifest.split[name])} {name}" for name in SPLITS)


def _announce(dataset: Dataset, settings: Settings, names: Mapping[int, str]) -> None:
    """Print the data set's cases, channels, patients and label codes; `names` are those of the codes in the files."""
    channels, regions = ", ".join(dataset.channels), regions_of(dataset.labels)
    always = labels_in_use(dataset.layout, dataset.labels, ())
    print(f"{dataset.name}: {count(dataset.cases, 'case')}, layout {dataset.layout}, channels {channels}")
    print("Labels and regions:")
    for code, name in sorted(dataset.labels.items()):
        within = ", ".join(region for region, codes in regions.items() if code in codes) or "no region"
        print(f"  {code} {name} -> {within}{'' if code in always else ', where a label holds it'}")
    for old, new in sorted(settings.label_map.items()):
        print(f"  {old} {names.get(old, '(no name)')} in the files is read as {new} {dataset.labels[new]}")
    rules = describe_patients(Counter(dataset.patient_rules.values()), len(dataset.cases))
    print(f"Patients: {len({case.patient_id for case in dataset.cases})}", *rules, sep="\n  ")
    if UNKNOWN in dataset.patient_rules.values():
        print("  where a patient has several cases, name them with --patients FILE: scores on them would be too good")


def _refuse_other_content(
    store_dir: Path, old: Manifest, dataset: Dataset, fractions: Fractions, seed: int, verify: bool
) -> None:
    """Raise InputError, naming every difference, where this run would change the content of a finished store."""
    files_of, recorded_as, differences = {files.case_id: files for files in dataset.cases}, defaultdict(set), []
    patients = {record.case_id: record.patient_id for record in old.cases}
    for case_id in sorted(set(files_of) - {*patients, *read_quarantine(store_dir)}):
        differences.append(f"case {case_id} is new in {dataset.folder}")
    for record in old.cases:
        files = files_of.get(record.case_id)
        if files is None:
            differences.append(f"case {record.case_id} is no longer whole in {dataset.folder}")
            continue
        recorded_as[files.patient_id].add(record.patient_id)
        if not same_sources(files, record, dataset.folder, verify):
            differences.append(f"the source of case {record.case_id} has changed")
    for patient, names_in_store in recorded_as.items():
        if len(names_in_store) > 1:
            differences.append(f"patient {patient} counts as several, {', '.join(sorted(names_in_store))}")
    if seed != old.split_seed or _split(patients, fractions, seed, {}) != old.split:
        differences.append(f"--split and --seed ask for another split than {split_sizes(old)}, seed {old.split_seed}")
    rule = f"store {store_dir} is finished and must keep its content"
    advice = "give another --store for the new content, or add new cases with `store append`; it is untouched"
    refuse([*(f"{rule}, but {one}" for one in differences), advice] if differences else ())


def _split(patients: Mapping[str, str], fractions: Fractions, seed: int, problems: Problems) -> Split:
    """`split_cases`, with the problems of the bad cases where too few good ones are left."""
    try:
        return split_cases(patients, fractions=fractions, seed=seed)
    except InputError as error:
        raise InputError(*(one for reasons in problems.values() for one in reasons), *error.problems) from None
