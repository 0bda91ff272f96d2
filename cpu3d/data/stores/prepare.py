"""Convert a data set of NIfTI volumes into a store, from which training reads at the speed of memory.

Example: ./run.sh prepare --dataset Task01_BrainTumour --store store

Each case is written whole or not at all: its record is written after its arrays, and the manifest
of the finished store last. The same command continues after an interruption. source.json names the
data set and the settings, quarantine.jsonl the cases that were left out. A store has cases whose
files give the patient's orientation, or cases whose files do not: those of the smaller group are
bad cases.
"""

import contextlib
import errno
import functools
import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import msgspec
import numpy as np

from cpu3d.data.files.arrays import FORMATS, encode, file_sha256, give_back
from cpu3d.data.files.reader import Reader, choose_read_mode, file_system
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
from cpu3d.data.store import Store, open_store, write_store
from cpu3d.data.stores.case import case_notes, load_case, mixed_orientation, note_lines
from cpu3d.data.stores.layouts import UNKNOWN, CaseFiles, Dataset, Problems, labels_in_use, read_dataset, regions_of
from cpu3d.data.stores.splits import describe_patients, split_cases
from cpu3d.errors import InputError, refuse
from cpu3d.util.atomic import atomic_write, is_untouched, remove_partials, writable_folder, write_json
from cpu3d.util.child import KILLED, run_jobs, worker_count
from cpu3d.util.lock import locked
from cpu3d.util.progress import bar, say
from cpu3d.util.records import count, versions
from memory_estimator.common.files import read_json, read_record, read_regular, typed
from memory_estimator.common.schema import check, option
from memory_estimator.common.units import by, format_bytes

Fractions = Tuple[float, float, float]

PATIENTS_HELP = (
    "table of two columns, case and patient (CSV, or with semicolons or tabs), for cases whose names do not show the"
    " patient as BraTS-GLI-00001-000 does; a patient's cases stay in one split"
)
WORKERS_HELP = "processes; each holds about two volumes (default: one per usable core)"
SKIP_BAD_HELP = "leave out bad cases and list them in quarantine.jsonl"


@dataclass(frozen=True)
class Settings:
    """The settings by which cases become arrays. A store is continued with the same settings only."""

    format: str = option(
        "npy",
        "npy: int16 if that is exact, else float16 z-scores, read without unpacking; b2nd: the same packed to a tenth,"
        " for slow disks and networks",
        choices=FORMATS,
    )
    crop: bool = option(False, "store each brain's box only; voxels outside it are 0")
    zero_nan: bool = option(False, "make NaN and infinite voxels background, and count them")

    def __post_init__(self):
        check(self)


USUAL = Settings()


@dataclass(frozen=True)
class Options:
    """The options of `prepare`."""

    dataset: Path = option(help="folder in Decathlon or BraTS layout, or one BraTS case")
    store: Path = option(help="folder to write; made if absent, continued if unfinished")
    split: Fractions = option((0.8, 0.1, 0.1), "shares of the patients", metavar=("TRAIN", "VAL", "TEST"))
    seed: int = option(0, "seed of the split")
    patients: Optional[Path] = option(None, PATIENTS_HELP, metavar="FILE")
    workers: Optional[int] = option(None, WORKERS_HELP, at_least=1)
    skip_bad: bool = option(False, SKIP_BAD_HELP)


OPTIONS = (Options, Settings)


def run(options: Options, settings: Settings) -> int:
    named = dict(vars(options))
    prepare(named.pop("dataset"), named.pop("store"), fractions=named.pop("split"), settings=settings, **named)
    return 0


def prepare(
    dataset_dir: Union[str, Path],
    store_dir: Union[str, Path],
    *,
    fractions: Fractions = (0.8, 0.1, 0.1),
    seed: int = 0,
    workers: Optional[int] = None,
    skip_bad: bool = False,
    settings: Settings = USUAL,
    patients: Optional[Path] = None,
) -> Manifest:
    """Write the store of the data set in `dataset_dir`, print a summary and return its manifest.

    A finished store stays as it is, but for cases whose files are gone or of another length, which are made again; an
    unfinished one is continued with its own `settings` only. Several workers are processes that import the calling
    script: guard its start with `if __name__ == "__main__"`. Raises InputError for bad cases unless `skip_bad`, a bad
    data set or split, and a store of other content or settings; OSError when writing fails, KeyboardInterrupt on
    Ctrl-C. Finished cases are kept then.
    """
    workers, store_dir = worker_count(workers), Path(store_dir)
    dataset = read_dataset(dataset_dir, patients)
    _announce(dataset)
    split_cases({case.case_id: case.patient_id for case in dataset.cases}, fractions=fractions, seed=seed)  # fail early
    if store_dir.resolve() == dataset.folder.resolve():
        raise InputError(f"store {store_dir} must be another folder than the data set, got the same; choose one")
    with claimed(store_dir, "store", "source.json", identity(dataset, settings)):
        if (store_dir / "manifest.json").exists():
            manifest, reader = open_store(store_dir).manifest, Reader(store_dir, "pread")
            _refuse_other_content(store_dir, manifest, dataset, fractions, seed)
            if any(map(reader.problems, manifest.cases)):
                manifest = _repaired(store_dir, manifest, dataset, settings, workers)
                write_store(store_dir, manifest)
                print_summary(store_dir)
            else:
                say(f"Nothing to do: store {store_dir} is finished and unchanged.", stderr=False)
            return manifest
        records, problems = convert_all(dataset.cases, dataset, store_dir, settings, workers)
        mixed = mixed_orientation(records.values())
        records = {case_id: record for case_id, record in records.items() if case_id not in mixed}
        problems.update({**dataset.problems, **mixed})
        if not skip_bad:
            refuse_bad_cases(problems, f"{count(records, 'good case')} kept in {store_dir}")
        manifest = _manifest_of(dataset, records, fractions, seed)
        write_quarantine(store_dir, problems)
        write_store(store_dir, manifest)
    print_summary(store_dir)
    return manifest


def _manifest_of(dataset: Dataset, records: Mapping[str, CaseRecord], fractions: Fractions, seed: int) -> Manifest:
    """The manifest of a new store with these cases, whose split is drawn now."""
    patients_of = {case_id: record.patient_id for case_id, record in records.items()}
    codes = {code for record in records.values() for code in record.label_voxels}
    labels = labels_in_use(dataset.layout, dataset.labels, codes)
    return make_manifest(
        name=dataset.name,
        layout=dataset.layout,
        channels=dataset.channels,
        labels=labels,
        regions=regions_of(labels),
        split=split_cases(patients_of, fractions=fractions, seed=seed),
        split_seed=seed,
        cases=list(records.values()),
        versions=versions(),
        patient_rules=Counter(dataset.patient_rules[case_id] for case_id in sorted(records)),
    )


def _repaired(store_dir: Path, old: Manifest, dataset: Dataset, settings: Settings, workers: int) -> Manifest:
    """The manifest of a finished store after its damaged cases were made again, with the same cases and split."""
    own = {case.case_id for case in old.cases}
    cases = [files for files in dataset.cases if files.case_id in own]
    records, problems = convert_all(cases, dataset, store_dir, settings, workers)
    refuse_bad_cases(problems, f"{count(records, 'good case')} kept in {store_dir}")
    manifest = remake(old, cases=list(records.values()))
    if manifest.split_hash != old.split_hash:  # the hash includes the voxels
        rule = f"the damaged cases of {store_dir} must get back the voxels that they had, of hash {old.split_hash}"
        raise InputError(f"{rule}, got {manifest.split_hash}; use the versions in manifest.json")
    return manifest


def split_sizes(manifest: Manifest) -> str:
    """The cases of each split, as "8 train, 1 val, 1 test"."""
    return ", ".join(f"{len(manifest.split[name])} {name}" for name in SPLITS)


def _announce(dataset: Dataset) -> None:
    """Print the data set's cases, channels, patients and label codes."""
    channels, regions = ", ".join(dataset.channels), regions_of(dataset.labels)
    always = labels_in_use(dataset.layout, dataset.labels, ())
    head = f"{dataset.name}: {count(dataset.cases, 'case')}, layout {dataset.layout}, channels {channels}"
    lines = [head, "Labels and regions:"]
    for code, name in sorted(dataset.labels.items()):
        within = ", ".join(region for region, codes in regions.items() if code in codes) or "no region"
        lines.append(f"  {code} {name} -> {within}{'' if code in always else ', if a label holds it'}")
    lines.append(f"Patients: {len({case.patient_id for case in dataset.cases})}")
    lines += [f"  {rule}" for rule in describe_patients(Counter(dataset.patient_rules.values()))]
    if UNKNOWN in dataset.patient_rules.values():
        lines.append("  if a patient has several cases, name them with --patients FILE, or test scores may be too good")
    say(*lines, stderr=False)


def _refuse_other_content(store_dir: Path, old: Manifest, dataset: Dataset, fractions: Fractions, seed: int) -> None:
    """Raise InputError, naming every difference, if this run would change the content of a finished store."""
    files_of, patients = {files.case_id: files for files in dataset.cases}, {}
    left_out = read_quarantine(store_dir)
    differences = []
    for record in old.cases:
        patients[record.case_id] = record.patient_id
        files = files_of.pop(record.case_id, None)
        if files is None:
            differences.append(f"case {record.case_id} is no longer whole in {dataset.folder}")
        elif files.patient_id != record.patient_id:
            differences.append(f"case {record.case_id} is of patient {record.patient_id} and not {files.patient_id}")
        elif not same_sources(files, record):
            differences.append(f"the source of case {record.case_id} has changed")
    differences += [f"case {case_id} is new in {dataset.folder}" for case_id in files_of if case_id not in left_out]
    if seed != old.split_seed or split_cases(patients, fractions=fractions, seed=seed) != old.split:
        differences.append(f"--split and --seed ask for another split than {split_sizes(old)}, seed {old.split_seed}")
    rule = f"store {store_dir} is finished and must keep its content"
    advice = "give another --store for the new content, or add new cases with `store append`; it is untouched"
    refuse([*(f"{rule}, but {difference}" for difference in differences), advice] if differences else ())


# --- Cases into arrays ---


def convert(
    dataset: Dataset, store_dir: Path, settings: Settings, files: CaseFiles
) -> Union[CaseRecord, Tuple[str, ...]]:
    """Write a case's arrays, then its record, unless they are there and good.

    Returns the record, or the problems of the case. Raises OSError.
    """
    record = _finished(store_dir, files)
    if record:
        return record
    rule = f"case {files.case_id} must"
    try:
        case = load_case(
            files,
            channels=dataset.channels,
            labels=dataset.labels,
            dataset_folder=dataset.folder,
            zero_nan=settings.zero_nan,
        )
    except InputError as error:
        return error.problems
    except Exception as error:  # any failure of one case, too little memory too, leaves the others to be converted
        got = f"{type(error).__name__}: {error}"
        return (f"{rule} be readable in memory, got {got}; repair it, leave it out, or use fewer --workers",)
    record = write_arrays(
        store_dir, case.record, case.image, case.label, format_=settings.format, cropped=settings.crop
    )
    write_json(record_path(store_dir, record.case_id), to_json(record))
    return record


def _finished(store_dir: Path, files: CaseFiles) -> Optional[CaseRecord]:
    """The record of a case whose arrays are as they were written, from the sources that it has now; else None."""
    try:
        record = case_from_json(read_regular(record_path(store_dir, files.case_id)))
    except (FileNotFoundError, ValueError):
        return None
    same = record.patient_id == files.patient_id and same_sources(files, record)
    return record if same and not Reader(store_dir, "pread").problems(record, contents=True) else None


def same_sources(files: CaseFiles, record: CaseRecord) -> bool:
    """Whether a case has the files that it was made from, by size and date, or by hash if the date is another."""
    if len(files.paths) != len(record.sources):
        return False
    for path, source in zip(files.paths, record.sources):
        status = path.stat()
        if status.st_size != source.size_bytes:
            return False
        if status.st_mtime_ns != source.mtime_ns and file_sha256(path) != source.sha256:
            return False
    return True


def write_arrays(
    store: Path, record: CaseRecord, image: np.ndarray, label: Optional[np.ndarray], *, format_: str, cropped: bool
) -> CaseRecord:
    """Write a case's arrays, which are on its whole grid, and return its record with the facts of the files.

    `cropped` keeps only the brain's box; outside it the voxels are 0. Files are read back and compared. Raises OSError.
    """
    stored = record.box if cropped else whole(record.shape)
    record, changes = replace(record, format=format_, stored=stored), {}
    for part, name, full in (("x", "image", image), ("y", "label", label)):
        if full is None:
            continue
        pieces, path = encode(np.ascontiguousarray(crop(full, stored)), format_), array_path(store, record, part)
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
    cases: Sequence[CaseFiles], dataset: Dataset, store_dir: Path, settings: Settings, workers: int
) -> Tuple[Dict[str, CaseRecord], Problems]:
    """The records of all good cases, finished ones included, and the problems of the bad ones, by case id.

    Raises OSError, as on a full disk, and KeyboardInterrupt, both with the number of cases that are kept.
    """
    records, problems = {}, {}
    bare = replace(dataset, cases=(), problems={}, patient_rules={})
    results = run_jobs(functools.partial(convert, bare, store_dir, settings), cases, workers)
    try:
        with contextlib.closing(results), bar("prepare", total=len(cases)) as advance:
            for files, outcome in results:
                if isinstance(outcome, CaseRecord):
                    records[files.case_id] = outcome
                elif outcome is KILLED:
                    rule = f"case {files.case_id} must fit into memory, got a killed process"
                    problems[files.case_id] = [f"{rule}; use fewer --workers"]
                else:
                    problems[files.case_id] = list(outcome)
                advance()
    except (OSError, KeyboardInterrupt) as error:
        finished = list((store_dir / "cases").glob("*.json"))
        kept = f"{count(finished, 'finished case')} kept in {store_dir}; run the same command again to continue"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(kept) from None
        raise OSError(error.errno, f"writing stopped, {error.strerror}; {kept}", str(store_dir)) from error
    finally:
        remove_partials(store_dir, store_dir / "cases")
    return records, problems


def refuse_bad_cases(problems: Problems, kept: str) -> None:
    """Raise InputError with all problems of a data set's cases, if any; `kept` are words for the cases that stay."""
    advice = "repair the bad cases and run again, or leave them out with --skip-bad"
    rule = f"the data set must be without bad cases, got {count(problems, 'bad case')}; {kept}: {advice}"
    refuse([*(problem for case_id in sorted(problems) for problem in problems[case_id]), rule] if problems else ())


# --- The store's folder ---


@contextlib.contextmanager
def claimed(
    folder: Path, kind: str, name: str, content: Mapping[str, Any], parts: Sequence[str] = ("cases",)
) -> Iterator[None]:
    """Lock a folder, made if absent, for the work that `content` describes; remove what killed processes left.

    An empty folder gets `content` as its file `name`; a folder with the same content is continued. `parts` are folders
    in it. Raises InputError, and changes nothing, if it holds other files, cannot be written, or is in use.
    """
    path = folder / name
    if not (folder / "manifest.json").exists():  # a finished store may be read-only
        writable_folder(folder, kind)
    with locked(folder, kind):
        if path.is_file():
            begun = _read_object(path)
            differences = [
                f"{field} of {kind} {folder} must be {begun.get(field)!r}, as it was begun, got {value!r}"
                for field, value in content.items()
                if begun.get(field) != value
            ]
            refuse([*differences, f"choose another {kind}; nothing was touched"] if differences else ())
        elif not is_untouched(folder, name):
            names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:3])
            raise InputError(f"{kind} {folder} must be empty or hold {name}, got {names}; choose another")
        else:
            write_json(path, content)
        for part in parts:
            (folder / part).mkdir(exist_ok=True)
        remove_partials(folder, *(folder / part for part in parts))
        yield


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
    }


def settings_of(store_dir: Path) -> Settings:
    """The settings in a store's source.json. Raises InputError if there is none, or one that is damaged."""

    def made(content: Dict[str, Any]) -> Settings:
        return typed({name: content[name] for name in vars(USUAL)}, Settings, "source")

    todo = "restore it, or prepare a new store"
    try:
        return read_record(store_dir / "source.json", SCHEMA, made, todo, InputError)
    except FileNotFoundError:
        raise InputError(f"store {store_dir} must hold source.json with its settings, found none; {todo}") from None


class _BadCase(msgspec.Struct):
    """A line of quarantine.jsonl."""

    case_id: str
    reasons: List[str]


def read_quarantine(store_dir: Path) -> Problems:
    """The cases that were left out of the store, with the reasons. Raises InputError if the list is damaged."""
    path = store_dir / "quarantine.jsonl"
    try:
        bad = msgspec.json.Decoder(_BadCase).decode_lines(path.read_bytes() if path.is_file() else b"")
    except (msgspec.MsgspecError, RecursionError) as error:
        rule = f"{path} must be JSON lines of a case_id and its reasons, got {error}"
        raise InputError(f"{rule}; restore or delete the file") from None
    return {case.case_id: case.reasons for case in bad}


def write_quarantine(store_dir: Path, problems: Problems) -> None:
    """Write a JSON line for each bad case; without bad cases, remove the file."""
    path = store_dir / "quarantine.jsonl"
    if not problems:
        path.unlink(missing_ok=True)
        return
    with atomic_write(path, "w") as file:
        lines = (json.dumps({"case_id": case_id, "reasons": problems[case_id]}) for case_id in sorted(problems))
        file.writelines(f"{line}\n" for line in lines)


def _read_object(path: Path) -> Dict[str, Any]:
    with contextlib.suppress(ValueError):
        content = read_json(path)
        if isinstance(content, dict):
            return content
    raise InputError(f"{path} must be as it was written, got no JSON object; choose another folder")


# --- Its summary ---


def summary_lines(store: Store) -> List[str]:
    """A summary of a store's records, as lines."""
    manifest, patients, error, zeroed, size_bytes = store.manifest, set(), 0.0, 0, 0
    notes = {}
    formats, shapes, cases, voxels = Counter(), Counter(), Counter(), Counter()
    for record in manifest.cases:
        patients.add(record.patient_id)
        if of_case := case_notes(record, manifest.channels):
            notes[record.case_id] = of_case
        size_bytes += record.image_bytes + record.label_bytes
        formats[f"{record.image_dtype} .{record.format}{' cropped' * (record.stored.size != record.shape)}"] += 1
        shapes[by(record.shape)] += 1
        cases.update(list(record.label_voxels))
        voxels.update(record.label_voxels)
        error, zeroed = max(error, record.max_abs_error), zeroed + record.zeroed_voxels
    exact = f"rounded by up to {error:.1g} std" if error else "exact"
    kind = file_system(store.folder)
    lines = {
        "cases": f"{len(manifest.cases)} of {count(patients, 'patient')}, {len(manifest.unlabelled)} unlabelled",
        "patients": "; ".join(describe_patients(manifest.patient_rules)),
        "split": f"{split_sizes(manifest)}, seed {manifest.split_seed}, hash {manifest.split_hash}",
        "channels": ", ".join(manifest.channels),
        "images": f"{', '.join(f'{n} {form}' for form, n in formats.most_common())}; {exact}",
        "size": f"{format_bytes(size_bytes)} on disk",
        "shapes": ", ".join(f"{shape} ({n})" for shape, n in shapes.most_common(6)),
        "largest": f"grid {by(manifest.largest_shape)}, brain's box {by(manifest.largest_box)}",
        "zeroed": f"{count(zeroed, 'NaN or infinite voxel')} made background" if zeroed else "",
        "read": f"with {choose_read_mode(kind)}, from {kind or 'an unknown file system'}",
    }
    for code, name in sorted(manifest.labels.items()):
        regions = ", ".join(region for region, codes in manifest.regions.items() if code in codes) or "no region"
        share = f"{voxels[code] / max(sum(voxels.values()), 1):.3%}"
        lines[f"label {code}"] = f"{name} -> {regions}: {count(cases[code], 'case')}, {share} of the voxels"
    head = f"Store {store.folder}: {manifest.name}, layout {manifest.layout}"
    shown = [f"  {name:<8} {line}" for name, line in lines.items() if line]
    return [head, *shown, *note_lines(notes)]


def print_summary(store_dir: Path) -> None:
    """Print the summary of a finished store, and how many cases were left out of it."""
    say(*summary_lines(open_store(store_dir)), stderr=False)
    bad = read_quarantine(store_dir)
    if bad:
        path = store_dir / "quarantine.jsonl"
        say(f"  left out {count(bad, 'bad case')}, see {path}; add repaired cases with `store append`", stderr=False)
