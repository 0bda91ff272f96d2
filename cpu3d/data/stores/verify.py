"""A summary of a store from its records (`describe`), and the check of every file and voxel (`verify`)."""

import functools
from collections import Counter
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple, Union

import msgspec
import numpy as np

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.files.reader import Reader, choose_read_mode, file_system, parts_of
from cpu3d.data.records import CaseRecord, Manifest, array_path, case_from_json, record_path
from cpu3d.data.splits import describe_patients
from cpu3d.data.store import Store, on_grid, open_store
from cpu3d.data.stores.case import facts_of
from cpu3d.data.stores.layouts import Problems
from cpu3d.errors import InputError
from cpu3d.util.child import KILLED, run_jobs, worker_count
from cpu3d.util.progress import bar
from cpu3d.util.records import by, count
from memory_estimator.common.files import read_regular
from memory_estimator.host import read_host

CLOSE = 1e-9
"""Relative difference of a mean or deviation that another order of additions, as in another NumPy, may make."""

ADVICE = "restore it, or make the case again with `prepare --verify`"


class _BadCase(msgspec.Struct):
    """A line of quarantine.jsonl."""

    case_id: str
    reasons: List[str]


def read_quarantine(store_dir: Path) -> Problems:
    """The cases that were left out of the store, with the reasons. Raises InputError where the list is damaged."""
    path = store_dir / "quarantine.jsonl"
    try:
        bad = msgspec.json.Decoder(_BadCase).decode_lines(path.read_bytes() if path.is_file() else b"")
    except (msgspec.MsgspecError, RecursionError) as error:
        rule = f"{path} must be JSON lines of a case_id and its reasons, got {error}"
        raise InputError(f"{rule}; restore or delete the file") from None
    return {case.case_id: case.reasons for case in bad}


def describe(store: Store, *, free_bytes: int) -> List[str]:
    """A summary of a store's records, as lines.

    `free_bytes`: memory that a run may use, for the read mode that would be chosen. Raises InputError for a damaged
    record.
    """
    manifest, patients, error, zeroed, size_bytes = store.manifest, set(), 0.0, 0, 0
    formats, shapes, cases, voxels = Counter(), Counter(), Counter(), Counter()
    for record in manifest.cases:
        patients.add(record.patient_id)
        size_bytes += record.image_bytes + record.label_bytes
        formats[f"{record.image_dtype} .{record.format}{' cropped' * (record.stored.size != record.shape)}"] += 1
        shapes[by(record.shape)] += 1
        cases.update(list(record.label_voxels))
        voxels.update(record.label_voxels)
        error, zeroed = max(error, record.max_abs_error), zeroed + record.zeroed_voxels
    train_bytes = sum(record.image_bytes + record.label_bytes for record in store.cases("train"))
    facts = {"file_system": file_system(store.folder), "needed_bytes": train_bytes, "free_bytes": free_bytes}
    whose = f"{len(manifest.cases)} of {count(patients, 'patient')}, {len(manifest.unlabelled)} unlabelled"
    split = ", ".join(f"{len(ids)} {name}" for name, ids in manifest.split.items())
    exact = f"rounded by up to {error:.1g} std" if error else "exact"
    lines = {
        "cases": whose,
        "patients": "; ".join(describe_patients(manifest.patient_rules, len(manifest.cases))),
        "split": f"{split}, seed {manifest.split_seed}, hash {manifest.split_hash}",
        "channels": ", ".join(manifest.channels),
        "images": f"{', '.join(f'{n} {what}' for what, n in formats.most_common())}; {exact}",
        "size": f"{size_bytes / 1e6:,.1f} MB on disk",
        "shapes": ", ".join(f"{shape} ({n})" for shape, n in shapes.most_common(6)),
        "largest": f"grid {by(manifest.largest_shape)}, brain's box {by(manifest.largest_box)}",
        "zeroed": f"{count(zeroed, 'NaN or infinite voxel')} made background" if zeroed else "",
        "volumes": f"read with {choose_read_mode(None, **facts, patches=False).reason}",
        "patches": f"read with {choose_read_mode(None, **facts, patches=True).reason}",
    }
    for code, name in sorted(manifest.labels.items()):
        regions = ", ".join(region for region, codes in manifest.regions.items() if code in codes) or "no region"
        share = f"{voxels[code] / max(sum(voxels.values()), 1):.3%}"
        lines[f"label {code}"] = f"{name} -> {regions}: {count(cases[code], 'case')}, {share} of the voxels"
    head = f"Store {store.folder}: {manifest.name}, layout {manifest.layout}"
    return [head, *(f"  {name:<8} {line}" for name, line in lines.items() if line)]


def summarise(store_dir: Path) -> None:
    """Print the summary of a finished store, and how many cases were left out of it."""
    print(*describe(open_store(store_dir), free_bytes=read_host().free_bytes), sep="\n")
    bad = read_quarantine(store_dir)
    if bad:
        path = store_dir / "quarantine.jsonl"
        print(f"  left out {count(bad, 'bad case')}, see {path}; once repaired they can be added with `store append`")


def verify(store_dir: Union[str, Path], *, workers: Optional[int] = None) -> Tuple[str, ...]:
    """Compare a store's arrays with its records, case by case in processes, and return all problems.

    Of each file: length and SHA-256. Of the voxels, unpacked and on their whole grid: SHA-256, statistics, box, label
    counts and centres. Of a case's own record: that it is the store's. Of the manifest: that it follows from the
    records. Raises InputError as `open_store`, which compares manifest and records with their SHA-256, and for a record
    that contradicts itself.
    """
    workers, store = worker_count(workers), open_store(store_dir)
    records = list(store.manifest.cases)
    problems = _manifest_problems(store.folder, store.manifest, records)
    try:
        store.check_split()
    except InputError as error:
        problems += error.problems
    with bar("verify", total=len(records)) as advance:
        for record, found in run_jobs(functools.partial(_case_problems, store.folder), records, workers):
            killed = f"case {record.case_id} must fit into memory, but its process was killed; use fewer --workers"
            problems += [killed] if found is KILLED else found
            advance()
    return tuple(problems)


def _manifest_problems(folder: Path, manifest: Manifest, records: Sequence[CaseRecord]) -> List[str]:
    """What in a manifest does not follow from its records, and what in the records is not in the manifest."""
    follows = {
        "largest_shape": tuple(map(max, zip(*(record.shape for record in records)))),
        "largest_box": tuple(map(max, zip(*(record.box.size for record in records)))),
        "unlabelled": tuple(record.case_id for record in records if not record.has_label),
    }
    problems = [
        f"{name} in the manifest of {folder} must be {_short(value)}, got {_short(getattr(manifest, name))}; restore it"
        for name, value in follows.items()
        if tuple(getattr(manifest, name)) != value
    ]
    for name, codes in manifest.regions.items():
        if not {*codes} <= {*manifest.labels}:
            problems.append(f"region {name} of store {folder} must be of its labels, got {list(codes)}; {ADVICE}")
    for record in records:
        if record.channels != len(manifest.channels) or not {*record.label_voxels} <= {*manifest.labels}:
            got = f"{record.channels} channels and codes {[*record.label_voxels]}"
            problems.append(
                f"record of case {record.case_id} must have the store's channels and codes, got {got}; {ADVICE}"
            )
    return problems


def _case_problems(folder: Path, record: CaseRecord) -> List[str]:
    """All problems of one case's arrays and of its own record's file."""
    reader, voxels = Reader(folder, "pread"), {}
    problems = reader.problems(record)
    for part in () if problems else parts_of(record):
        path = array_path(folder, record, part)
        try:
            if file_sha256(path) == (record.image_sha256 if part == "x" else record.label_sha256):
                voxels[part] = on_grid(reader.array(record, part), record)
            else:
                problems.append(f"store file {path} must be as it was written, got other content; {ADVICE}")
        except InputError as error:
            problems += error.problems
        except (OSError, ValueError, OverflowError, MemoryError) as error:  # the last two of impossible shapes
            problems.append(f"store file {path} must be readable, got {error}; {ADVICE}")
    if not problems:
        problems = _differences(record, voxels["x"], voxels.get("y"))
    own = record_path(folder, record.case_id)
    try:
        if case_from_json(read_regular(own)) != record:
            problems.append(f"store file {own} must hold the case's record as the store does, got another; delete it")
    except FileNotFoundError:  # only an unfinished store needs it
        pass
    except (OSError, ValueError) as error:
        problems.append(f"store file {own} must hold the case's record, got {error}; delete it")
    return problems


def _differences(record: CaseRecord, image: np.ndarray, label: Optional[np.ndarray]) -> List[str]:
    """The fields of a record that do not follow from its voxels."""
    if not image.any(axis=(0, 1, 2)).all():
        return [f"image of case {record.case_id} must have voxels in every channel, got an empty one; {ADVICE}"]
    problems = []
    for name, value in facts_of(image, label).items():
        recorded = getattr(record, name)
        same = value == recorded
        if name in ("channel_mean", "channel_std"):
            same = len(value) == len(recorded) and np.allclose(value, recorded, rtol=CLOSE, atol=CLOSE)
        if not same:
            rule = f"{name} in the record of case {record.case_id} must follow from its voxels, {_short(value)}"
            problems.append(f"{rule}, got {_short(recorded)}; {ADVICE}")
    return problems


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
