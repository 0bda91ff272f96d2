"""What a store holds, from its records alone (`describe`), and whether it is that, voxel by voxel (`verify`)."""

import functools
from collections import Counter
from pathlib import Path
from typing import Any, List, Optional, Tuple, Union

import numpy as np

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.files.reader import Reader, choose_read_mode, file_system, parts_of
from cpu3d.data.records import CaseRecord, array_path, case_from_json, record_path
from cpu3d.data.splits import describe_patients
from cpu3d.data.store import Store, on_grid, open_store, read_manifest
from cpu3d.data.stores.case import facts_of
from cpu3d.errors import InputError
from cpu3d.util.child import KILLED, run_jobs, worker_count
from cpu3d.util.progress import bar
from cpu3d.util.records import by, count
from memory_estimator.common.files import read_regular

OF_ENTRY = ("case_id", "patient_id", "geometry", "spacing_mm", "sources", "zeroed_voxels")
"""Fields of a record that say something of the entry, and not of its arrays, which entries may share."""

CLOSE = 1e-9
"""Relative difference of a mean or deviation that another NumPy may make, by adding up in another order."""

ADVICE = "restore it, or make the case anew with `prepare --verify`"


def describe(store: Store, *, free_bytes: int) -> List[str]:
    """What a store's records tell, as lines. Bytes of shared arrays count once.

    `free_bytes`: memory that a run may use, for the read mode that would be chosen here. Raises InputError where a
    record is damaged.
    """
    manifest, patients, on_disk, error, zeroed = store.manifest, set(), {}, 0.0, 0
    formats, shapes, cases, voxels = Counter(), Counter(), Counter(), Counter()
    for record in manifest.cases:
        patients.add(record.patient_id)
        on_disk[record.stem] = record.image_bytes + record.label_bytes
        formats[f"{record.image_dtype} .{record.format}{' cropped' * (record.stored.size != record.shape)}"] += 1
        shapes[by(record.shape)] += 1
        cases.update(list(record.label_voxels))
        voxels.update(record.label_voxels)
        error, zeroed = max(error, record.max_abs_error), zeroed + record.zeroed_voxels
    kind, train = file_system(store.folder), {record.stem for record in store.cases("train")}
    facts = {"file_system": kind, "needed_bytes": sum(map(on_disk.get, train)), "free_bytes": free_bytes}
    shared = "" if len(on_disk) == len(manifest.cases) else f" sharing the arrays of {len(on_disk)}"
    whose = f"{len(manifest.cases)} of {count(patients, 'patient')}{shared}, {len(manifest.unlabelled)} unlabelled"
    split = ", ".join(f"{len(ids)} {name}" for name, ids in manifest.split.items())
    exact = f"rounded by up to {error:.1g} std" if error else "exact"
    lines = {
        "cases": whose,
        "patients": "; ".join(describe_patients(manifest.patient_rules, len(manifest.cases))),
        "split": f"{split}, seed {manifest.split_seed}, hash {manifest.split_hash}",
        "channels": ", ".join(manifest.channels),
        "images": f"{', '.join(f'{n} {what}' for what, n in formats.most_common())}; {exact}",
        "size": f"{sum(on_disk.values()) / 1e6:,.1f} MB on disk",
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


def verify(store_dir: Union[str, Path], *, workers: Optional[int] = None) -> Tuple[str, ...]:
    """Compare a store with its records, case by case in processes, and return all that is wrong.

    Of each file: length and SHA-256. Of the voxels, unpacked and on their whole grid: SHA-256, statistics, box, label
    counts and centres. Of the records: their file's SHA-256, the split, that entries with the same arrays say the same
    of them, and that the manifest says what follows from them. Raises InputError where there is no store to look at:
    no manifest, an edited one, another version.
    """
    workers, store = worker_count(workers), open_store(store_dir)
    folder, manifest, content = store.folder, store.manifest, read_manifest(store.folder)["records"]
    problems, facts, arrays = [], [], {}
    if file_sha256(folder / content["file"]) != content["sha256"]:
        problems.append(f"store file {folder}/{content['file']} must be as it was written; restore it")
    for place in range(len(manifest.cases)):
        try:
            record = manifest.cases[place]
        except InputError as error:
            problems += error.problems
            continue
        facts.append((record.shape, record.box.size, () if record.has_label else (record.case_id,)))
        problems += _entry_problems(store, record, arrays.setdefault(record.stem, record))
    if len(facts) == len(manifest.cases) > 0:  # what follows from damaged records is not known
        shapes, boxes, unlabelled = zip(*facts)
        largest = {"largest_shape": shapes, "largest_box": boxes}
        follows = {name: tuple(map(max, zip(*sizes))) for name, sizes in largest.items()}
        for name, value in {**follows, "unlabelled": tuple(sorted(sum(unlabelled, ())))}.items():
            if tuple(getattr(manifest, name)) != value:
                rule = f"{name} in the manifest of store {folder} must follow from its records"
                problems.append(f"{rule}, got {_short(getattr(manifest, name))}; restore it")
    for name, codes in manifest.regions.items():
        if not {*codes} <= {*manifest.labels}:
            problems.append(f"region {name} of store {folder} must be of its labels, got {list(codes)}; restore it")
    try:
        store.check_split()
    except InputError as error:
        problems += error.problems
    with bar("verify", total=len(arrays)) as advance:
        for record, found in run_jobs(functools.partial(_array_problems, folder), list(arrays.values()), workers):
            killed = f"case {record.case_id} must fit into memory, but its process was killed; free some"
            problems += [killed] if found is KILLED else found
            advance()
    return tuple(dict.fromkeys(problems))


def _entry_problems(store: Store, record: CaseRecord, first: CaseRecord) -> List[str]:
    """What contradicts itself in one record, beside the first one with the same arrays, without reading them."""
    manifest = store.manifest
    other = ", ".join(name for name in vars(first) if vars(record)[name] != vars(first)[name] and name not in OF_ENTRY)
    rules = (
        (record.channels == len(manifest.channels), f"have the store's channels, got {record.channels}"),
        ({*record.label_voxels} <= {*manifest.labels}, f"have the store's label codes, got {[*record.label_voxels]}"),
        (not other, f"say of its arrays what case {first.case_id} says of the same, got another {other}"),
    )
    return [f"record of case {record.case_id} must {rule}; {ADVICE}" for holds, rule in rules if not holds]


def _array_problems(folder: Path, record: CaseRecord) -> List[str]:
    """All that is wrong with one case's arrays, its own record's file among it."""
    reader, own, voxels = Reader(folder, "pread"), record_path(folder, record.case_id), {}
    problems = reader.problems(record)
    for part in () if problems else parts_of(record):
        path = array_path(folder, record, part)
        try:
            if file_sha256(path) == (record.image_sha256 if part == "x" else record.label_sha256):
                voxels[part] = on_grid(reader.array(record, part), record)
            else:
                problems.append(f"store file {path} must be as it was written, got other content; {ADVICE}")
        except (InputError, OSError, ValueError, OverflowError, MemoryError) as error:  # the latter of impossible sizes
            problems.append(str(error) if isinstance(error, InputError) else f"store file {path} must be read: {error}")
    if not problems and not voxels["x"].any(axis=(0, 1, 2)).all():
        problems = [f"image of case {record.case_id} must have voxels in every channel, got an empty one; {ADVICE}"]
    for name, value in facts_of(voxels["x"], voxels.get("y")).items() if not problems else ():
        found, same = getattr(record, name), value == getattr(record, name)
        if name in ("channel_mean", "channel_std"):
            same = len(value) == len(found) and np.allclose(value, found, rtol=CLOSE, atol=CLOSE)
        if not same:
            rule = f"{name} in the record of case {record.case_id} must follow from its voxels, {_short(value)}"
            problems.append(f"{rule}, got {_short(found)}; {ADVICE}")
    try:
        if case_from_json(read_regular(own)) != record:
            problems.append(f"store file {own} must hold the case's record as the store does, got another; delete it")
    except FileNotFoundError:  # only an unfinished store would go on from it
        pass
    except (OSError, ValueError) as error:
        problems.append(f"store file {own} must hold the case's record, got {error}; delete it")
    return problems


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
