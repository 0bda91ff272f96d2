"""Turn a data set of NIfTI volumes into a store that trains at the speed of memory.

Example: ./run.sh prepare --dataset Task01_BrainTumour --store store

Cases are converted in parallel and each is written whole or not at all: its record is written after its arrays and
marks them as good. A run that was cut, by Ctrl-C, a full disk or a lost machine, is continued by the same command; the
manifest comes last and marks the store as finished. source.json names the data set and the settings, quarantine.jsonl
the cases that were left out.
"""

import contextlib
import errno
import functools
import hashlib
import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from cpu3d.data.files.arrays import FORMATS, decode_b2nd, encode, file_sha256, give_back
from cpu3d.data.files.reader import Reader, parts_of
from cpu3d.data.records import (
    SCHEMA,
    SPLITS,
    CaseRecord,
    Manifest,
    array_path,
    case_from_json,
    make_manifest,
    record_path,
    remake,
    to_json,
)
from cpu3d.data.region import crop, whole
from cpu3d.data.splits import Split, describe_patients, split_cases
from cpu3d.data.store import open_store, write_store
from cpu3d.data.stores import layouts
from cpu3d.data.stores.case import load_case, source_name
from cpu3d.data.stores.layouts import CaseFiles, Dataset, Problems, labels_in_use, read_dataset, regions_of
from cpu3d.data.stores.verify import read_quarantine, summarise
from cpu3d.errors import InputError, refuse
from cpu3d.util.atomic import atomic_write, is_untouched, remove_partials, writable_folder, write_json
from cpu3d.util.child import KILLED, run_jobs, worker_count
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar
from cpu3d.util.records import count, versions
from memory_estimator.common.files import read_json, read_regular, typed
from memory_estimator.common.schema import option

Fractions = Tuple[float, float, float]

PATIENTS_HELP = (
    "table of two columns, case and patient (CSV, or with semicolons or tabs), where names such as BraTS-GLI-00001-000"
    " do not tell the patient; a patient's cases stay in one split"
)
WORKERS_HELP = "processes; each holds about two volumes (default: one per usable core)"
SKIP_BAD_HELP = "leave bad cases out and list them in quarantine.jsonl"


@dataclass(frozen=True)
class Settings:
    """How cases become arrays. A store is continued with the same settings only."""

    format: str = "npy"
    """Of the files, "npy" or "b2nd"."""
    crop: bool = False
    """Store each brain's box and not the whole grid."""
    zero_nan: bool = False
    """NaN and infinite voxels become background; without it they are an error."""
    label_map: Dict[int, int] = field(default_factory=dict)
    """Label codes to change while reading, old -> new."""

    def __post_init__(self):
        if self.format not in FORMATS:
            raise InputError(f"format of a store's files must be one of {', '.join(FORMATS)}, got {self.format!r}")


USUAL = Settings()


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
        settings=Settings(options.format, options.crop, options.zero_nan, layouts.parse_label_map(options.label_map)),
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
    `verify`. A store is continued with its own `settings` only. `patients` is a table of the cases' patients. Several
    workers are processes that import the calling script: guard its start with `if __name__ == "__main__"`.

    Raises InputError when cases are bad (the good ones are kept, the manifest is not written) unless `skip_bad`, for a
    bad data set or split, identical images in two splits, and a store of other content or settings; OSError when
    writing fails, as on a full disk, and KeyboardInterrupt on Ctrl-C. Finished cases are kept then.
    """
    workers, store_dir = worker_count(workers), Path(store_dir)
    in_files = read_dataset(dataset_dir, patients)
    dataset = layouts.with_label_map(in_files, settings.label_map)
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
    if layouts.UNKNOWN in dataset.patient_rules.values():
        print("  where a patient has several cases, name them with --patients FILE: scores on them would be too good")


def _refuse_other_content(
    store_dir: Path, old: Manifest, dataset: Dataset, fractions: Fractions, seed: int, verify: bool
) -> None:
    """Raise InputError, naming every difference, where this run would change the content of a finished store."""
    files_of, recorded_as = {files.case_id: files for files in dataset.cases}, defaultdict(set)
    patients = {record.case_id: record.patient_id for record in old.cases}
    new = sorted(set(files_of) - {*patients, *read_quarantine(store_dir)})
    differences = [f"case {case_id} is new in {dataset.folder}" for case_id in new]
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


# --- Cases into arrays ---


def convert(
    dataset: Dataset, store_dir: Path, settings: Settings, files: CaseFiles
) -> Union[CaseRecord, Tuple[str, ...]]:
    """Write a case's arrays, then its record, and return that, or what is wrong with the case. Raises OSError."""
    rule = f"case {files.case_id} must"
    try:
        case = load_case(
            files,
            channels=dataset.channels,
            labels=dataset.labels,
            dataset_folder=dataset.folder,
            zero_nan=settings.zero_nan,
            label_map=settings.label_map,
        )
    except InputError as error:
        return error.problems
    except MemoryError:
        return (f"{rule} fit into memory, got too little; run again with fewer --workers",)
    except Exception as error:  # any failure of one case leaves the others to be converted
        return (f"{rule} be readable, got {type(error).__name__}: {error}; repair it or leave it out",)
    record = write_arrays(
        store_dir, case.record, case.image, case.label, format_=settings.format, cropped=settings.crop
    )
    write_json(record_path(store_dir, record.case_id), to_json(record))
    return record


def write_arrays(
    store: Path, record: CaseRecord, image: np.ndarray, label: Optional[np.ndarray], *, format_: str, cropped: bool
) -> CaseRecord:
    """Write a case's arrays, given on its whole grid, and return its record with what follows from the files.

    `cropped` keeps only the brain's box; outside it the voxels are 0. Files are read back and compared. Raises OSError.
    """
    stored = record.box if cropped else whole(record.shape)
    record, changes = replace(record, format=format_, stored=stored), {}
    for part, name, full in (("x", "image", image), ("y", "label", label)):
        if full is None:
            continue
        array, path = np.ascontiguousarray(crop(full, stored)), array_path(store, record, part)
        pieces = encode(array, format_)
        if format_ == "b2nd" and not np.array_equal(decode_b2nd(pieces[0]), array):
            raise OSError(errno.EIO, "blosc2 does not unpack what it has packed; try another version", str(path))
        digest = hashlib.sha256()
        with atomic_write(path) as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
        with open(path, "rb") as file:
            give_back(file.fileno())  # so that the disk is read and not the kernel's copy
        if file_sha256(path) != digest.hexdigest():
            path.unlink()
            raise OSError(errno.EIO, "what was read back is not what was written, the disk may be failing", str(path))
        changes.update({f"{name}_bytes": sum(map(len, pieces)), f"{name}_sha256": digest.hexdigest()})
    return replace(record, **changes)


def convert_all(
    cases: Sequence[CaseFiles],
    dataset: Dataset,
    store_dir: Path,
    settings: Settings,
    workers: int,
    finished: Mapping[str, CaseRecord],
) -> Tuple[Dict[str, CaseRecord], Problems]:
    """The records of all good cases, `finished` ones included, and the problems of the bad ones, by case id.

    Raises OSError, as on a full disk, and KeyboardInterrupt, both with the number of cases that are kept.
    """
    records, problems = dict(finished), {}
    bare = replace(dataset, cases=(), problems={}, patient_rules={})
    waiting = [files for files in cases if files.case_id not in finished]
    results = run_jobs(functools.partial(convert, bare, store_dir, settings), waiting, workers)
    try:
        with contextlib.closing(results), bar("prepare", total=len(cases)) as advance:
            advance(len(finished))
            for files, outcome in results:
                if isinstance(outcome, CaseRecord):
                    records[files.case_id] = outcome
                elif outcome is KILLED:
                    rule = f"case {files.case_id} must fit into memory, but its process was killed"
                    problems[files.case_id] = [f"{rule}; use fewer --workers"]
                else:
                    problems[files.case_id] = list(outcome)
                advance()
    except (OSError, KeyboardInterrupt) as error:
        kept = f"{count(records, 'finished case')} kept in {store_dir}; run the same command again to continue"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(kept) from None
        raise OSError(error.errno, f"writing stopped, {error.strerror}; {kept}", str(store_dir)) from error
    finally:
        remove_partials(store_dir, store_dir / "cases")
    return records, problems


def refuse_bad_cases(problems: Problems, kept: str) -> None:
    """Raise InputError with all problems of a data set's cases, if any; `kept` says what was kept."""
    advice = "repair the bad cases and run again, or leave them out with --skip-bad"
    rule = f"the data set must be without bad cases, got {count(problems, 'bad case')}; {kept}: {advice}"
    refuse([*(reason for case_id in sorted(problems) for reason in problems[case_id]), rule] if problems else ())


@contextlib.contextmanager
def claimed(
    folder: Path, what: str, name: str, content: Mapping[str, Any], parts: Sequence[str] = ("cases",)
) -> Iterator[None]:
    """Lock a folder, made if absent, for the work that `content` describes; remove what killed processes left.

    An empty folder gets `content` as its file `name`; a folder that has the same content is continued. `parts` are
    folders in it. Raises InputError, and changes nothing, where the folder holds other files, cannot be written, or is
    in use.
    """
    path = folder / name
    if not (folder / "manifest.json").exists():  # a finished store may be read-only
        writable_folder(folder, what)
    with locked(folder, what):
        if path.is_file():
            begun = _read_object(path)
            differences = [
                f"{field} of {what} {folder} must be {begun.get(field)!r}, as it was begun, got {value!r}"
                for field, value in content.items()
                if begun.get(field) != value
            ]
            refuse([*differences, f"choose another {what}; nothing was touched"] if differences else ())
        elif not is_untouched(folder, name):
            raise InputError(f"{what} {folder} must be empty or begun by this command, got other files; choose another")
        else:
            write_json(path, content)
        for part in parts:
            (folder / part).mkdir(exist_ok=True)
        remove_partials(folder, *(folder / part for part in parts))
        yield


def finished_cases(
    store_dir: Path, cases: Sequence[CaseFiles], dataset_folder: Path, verify: bool
) -> Dict[str, CaseRecord]:
    """The records of the cases that need not be converted again, by case id.

    Their patient is the recorded one, their arrays have the recorded lengths and their sources are `same_sources`.
    `verify` compares the hashes of all files.
    """
    finished, reader = {}, Reader(store_dir, "pread")
    for files in cases:
        try:
            record = case_from_json(read_regular(record_path(store_dir, files.case_id)))
        except (FileNotFoundError, ValueError):
            continue
        same = record.patient_id == files.patient_id and same_sources(files, record, dataset_folder, verify)
        hashes = {"x": record.image_sha256, "y": record.label_sha256}
        for part in parts_of(record) if verify and same and not reader.problems(record) else ():
            same &= file_sha256(array_path(store_dir, record, part)) == hashes[part]
        if same and not reader.problems(record):
            finished[files.case_id] = record
    return finished


def same_sources(files: CaseFiles, record: CaseRecord, dataset_folder: Path, verify: bool) -> bool:
    """Whether a case has the sources that it was made from, by size and date; by hash where the date is another, or
    with `verify`."""
    same = [source_name(path, dataset_folder) for path in files.paths] == [source.path for source in record.sources]
    for path, source in zip(files.paths, record.sources) if same else ():
        status = path.stat()
        undecided = verify or status.st_mtime_ns != source.mtime_ns
        same &= status.st_size == source.size_bytes and not (undecided and file_sha256(path) != source.sha256)
    return same


def identity(content: Dataset, settings: Settings) -> Dict[str, Any]:
    """The content of source.json: the data set and the settings of a store."""
    labels = labels_in_use(content.layout, content.labels, ())
    return {
        "schema": SCHEMA,
        "name": content.name,
        "layout": content.layout,
        "channels": list(content.channels),
        "labels": {str(code): name for code, name in labels.items()},
        **asdict(settings),
        "label_map": {str(old): new for old, new in sorted(settings.label_map.items())},
    }


def settings_of(store_dir: Path) -> Settings:
    """The settings in a store's source.json, USUAL where it has none. Raises InputError where that is damaged."""
    path = store_dir / "source.json"
    content = _read_object(path) if path.is_file() else {}
    try:
        return typed({name: content[name] for name in vars(USUAL) if name in content}, Settings, "its content")
    except (ValueError, InputError) as error:
        raise InputError(f"{path} must be as `prepare` wrote it, got: {error}") from None


def write_quarantine(store_dir: Path, problems: Problems) -> None:
    """Write a JSON line for each bad case; no file without bad cases."""
    path = store_dir / "quarantine.jsonl"
    if not problems:
        path.unlink(missing_ok=True)
        return
    with atomic_write(path, "w") as file:
        file.writelines(json.dumps({"case_id": one, "reasons": problems[one]}) + "\n" for one in sorted(problems))


def _read_object(path: Path) -> Dict[str, Any]:
    with contextlib.suppress(ValueError):
        content = read_json(path)
        if isinstance(content, dict):
            return content
    raise InputError(f"{path} must be as it was written, got no JSON object; choose another folder")
