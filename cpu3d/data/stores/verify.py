"""What a store holds, from its records alone (`store_info`), and whether it is that, voxel by voxel (`verify`)."""

import dataclasses
import functools
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import numpy as np

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.files.reader import Reader, choose_read_mode, file_system, parts_of
from cpu3d.data.records import SPLITS, CaseRecord, array_path, case_from_json, largest, record_path
from cpu3d.data.region import EXTENTS, grid_size
from cpu3d.data.splits import describe_patients
from cpu3d.data.store import Store, on_grid, open_store, read_manifest
from cpu3d.data.stores.case import facts_of
from cpu3d.errors import InputError
from cpu3d.util.child import KILLED, run_jobs, worker_count
from cpu3d.util.progress import bar
from cpu3d.util.records import by, count
from memory_estimator.files import read_regular

OF_ENTRY = ("case_id", "patient_id", "geometry", "spacing_mm", "sources", "zeroed_voxels")
"""Fields of a record that say something of the entry."""

OF_ARRAYS = tuple(field.name for field in dataclasses.fields(CaseRecord) if field.name not in OF_ENTRY)
"""Those that say something of its arrays, which entries may share."""

CLOSE = 1e-9
"""Relative difference of a mean or deviation that another NumPy may make, by adding up in another order."""

MULTIPLE = 16
"""Of the grid, as `volume_dataset` rounds by default: four halvings."""

SHAPES_SHOWN = 6

ADVICE = "restore it, or make the case anew with `prepare --verify`"

# --- What it holds ---


def store_info(store: Store, *, free_bytes: int) -> Dict[str, Any]:
    """Everything about a store that its records tell, as JSON content. Bytes of shared arrays count once.

    `free_bytes`: memory that a run may use, for the read mode that would be chosen here. Raises InputError where a
    record is damaged.
    """
    manifest, train = store.manifest, set(store.manifest.split["train"])
    patients, on_disk, unpacked, needed = set(), {}, {}, {}
    formats, shapes, cases, voxels, sums = Counter(), Counter(), Counter(), Counter(), Counter()
    error = 0.0
    for record in manifest.cases:
        patients.add(record.patient_id)
        on_disk[record.stem] = record.image_bytes + record.label_bytes
        unpacked[record.stem] = math.prod(record.shape) * (2 * record.channels + record.has_label)
        if record.case_id in train:
            needed[record.stem] = on_disk[record.stem]
        formats[f"{record.image_dtype} .{record.format}"] += 1
        shapes[by(record.shape)] += 1
        cases.update(map(str, record.label_voxels))
        voxels.update({str(code): n for code, n in record.label_voxels.items()})
        sums.update(cropped=record.stored.size != record.shape, zeroed=record.zeroed_voxels)
        error = max(error, record.max_abs_error)
    kind, plans = file_system(store.folder), {}
    for work in ("volumes", "patches"):
        facts = {"file_system": kind, "needed_bytes": sum(needed.values()), "free_bytes": free_bytes}
        plan = choose_read_mode(None, **facts, patches=work == "patches")
        plans[work] = {"mode": plan.mode, "reason": plan.reason}
    return {
        "store": str(store.folder),
        "name": manifest.name,
        "layout": manifest.layout,
        "channels": list(manifest.channels),
        "labels": {str(code): name for code, name in manifest.labels.items()},
        "regions": {name: list(codes) for name, codes in manifest.regions.items()},
        "cases": len(manifest.cases),
        "patients": len(patients),
        "patient_rules": dict(manifest.patient_rules),
        "arrays": len(on_disk),
        "unlabelled": len(manifest.unlabelled),
        "split": {name: len(manifest.split[name]) for name in SPLITS},
        "split_seed": manifest.split_seed,
        "split_hash": manifest.split_hash,
        "formats": dict(formats.most_common()),
        "cropped_cases": sums["cropped"],
        "bytes_on_disk": sum(on_disk.values()),
        "bytes_unpacked": sum(unpacked.values()),
        "shapes": dict(shapes.most_common()),
        "largest_shape": list(manifest.largest_shape),
        "largest_box": list(manifest.largest_box),
        "grid": {extent: list(grid_size(store, extent=extent, multiple=MULTIPLE)) for extent in EXTENTS},
        "max_abs_error_std": error,
        "zeroed_voxels": sums["zeroed"],
        "label_voxels": {code: voxels[code] for code in sorted(voxels, key=int)},
        "label_cases": {code: cases[code] for code in sorted(cases, key=int)},
        "file_system": kind,
        "read": plans,
        "versions": dict(manifest.versions),
    }


def lines_of(info: Mapping[str, Any]) -> List[str]:
    """`store_info` for people, without the labels."""
    shapes = [f"{shape} ({n})" for shape, n in info["shapes"].items()]
    more = f" and {len(shapes) - SHAPES_SHOWN} more" if len(shapes) > SHAPES_SHOWN else ""
    shared = "" if info["arrays"] == info["cases"] else f" sharing the arrays of {info['arrays']}"
    cropped = f", {info['cropped_cases']} cropped to the brain's box" if info["cropped_cases"] else ""
    error = f"rounded by up to {info['max_abs_error_std']:.1g} std" if info["max_abs_error_std"] else "exact"
    split = ", ".join(f"{n} {name}" for name, n in info["split"].items())
    absent = [f"{code} {name}" for code, name in info["labels"].items() if code not in info["label_voxels"]]
    zeroed = count(info["zeroed_voxels"], "NaN or infinite voxel")
    lines = {
        "cases": f"{info['cases']} of {count(info['patients'], 'patient')}{shared}, {info['unlabelled']} unlabelled",
        "patients": "; ".join(describe_patients(info["patient_rules"], info["cases"])),
        "split": f"{split}, seed {info['split_seed']}, hash {info['split_hash']}",
        "channels": ", ".join(info["channels"]),
        "images": f"{', '.join(f'{n} {form}' for form, n in info['formats'].items())}{cropped}; {error}",
        "size": f"{info['bytes_on_disk'] / 1e6:,.1f} MB on disk, {info['bytes_unpacked'] / 1e6:,.1f} MB unpacked",
        "shapes": f"{', '.join(shapes[:SHAPES_SHOWN])}{more}",
        "largest": f"grid {by(info['largest_shape'])}, brain's box {by(info['largest_box'])}",
        "network": f"sees {by(info['grid']['brain'])} of a case in extent brain, {by(info['grid']['full'])} in full",
        "absent": f"{', '.join(absent)}: in no case's label" if absent else "",
        "zeroed": f"{zeroed} made background" if info["zeroed_voxels"] else "",
        **{work: f"read with {plan['reason']}" for work, plan in info["read"].items()},
    }
    head = f"Store {info['store']}: {info['name']}, layout {info['layout']}"
    return [head, *(f"  {name:<8} {line}" for name, line in lines.items() if line)]


# --- Whether it is that ---


@dataclass(frozen=True)
class Findings:
    """What a look at a whole store found."""

    problems: Tuple[str, ...]
    """All that is damaged or contradicts itself; none for a good store."""
    strays: Tuple[str, ...]
    """Files that belong to no case, relative to the store. They do no harm."""
    cases: int
    arrays: int
    """Cases whose arrays are their own; the others share them."""
    bytes_read: int
    """Of all files, each once."""


def verify(store_dir: Union[str, Path], *, workers: Optional[int] = None) -> Findings:
    """Compare a store with its records, case by case in processes, and return all that is wrong.

    Of each file: length and SHA-256. Of the voxels, unpacked and on their whole grid: SHA-256, statistics, box, label
    counts and centres. Of the records: their file's SHA-256, the split, that entries with the same arrays say the same
    of them, and that the manifest says what follows from them. Raises InputError where there is no store to look at:
    no manifest, an edited one, another version.
    """
    workers, store = worker_count(workers), open_store(store_dir)
    folder, manifest, content = store.folder, store.manifest, read_manifest(store.folder)["records"]
    problems: List[str] = []
    if file_sha256(folder / content["file"]) != content["sha256"]:
        rule = f"store file {folder / content['file']} must be as it was written"
        problems.append(f"{rule}, got other content; run `prepare` again")
    records, arrays = [], {}
    for place in range(len(manifest.cases)):
        try:
            record = manifest.cases[place]
        except InputError as error:
            problems += error.problems
            continue
        problems += _entry_problems(store, record, arrays.setdefault(record.stem, record))
        records.append((record.case_id, record.shape, record.box.size, record.has_label))
    if len(records) == len(manifest.cases) > 0:  # what follows from damaged records is not known
        ids, shapes, boxes, labelled = zip(*records)
        unlabelled = tuple(case_id for case_id, has_label in zip(ids, labelled) if not has_label)
        follows = {"largest_shape": largest(shapes), "largest_box": largest(boxes), "unlabelled": unlabelled}
        for name, value in follows.items():
            if getattr(manifest, name) != value:
                rule = f"{name} in the manifest of store {folder} must follow from its records"
                problems.append(f"{rule}, got {_short(getattr(manifest, name))}; restore it")
    try:
        store.check_split()
    except InputError as error:
        problems += error.problems
    for region, codes in manifest.regions.items():
        if not set(codes) <= set(manifest.labels):
            rule = f"region {region} in the manifest of store {folder} must be of the store's labels"
            problems.append(f"{rule}, got {codes}; restore it")
    with bar("verify", total=len(arrays)) as advance:
        for record, found in run_jobs(functools.partial(_array_problems, folder), list(arrays.values()), workers):
            killed = f"case {record.case_id} must fit into memory, but its process was killed; free some"
            problems += [killed] if found is KILLED else found
            advance()
    known = {"manifest.json", "source.json", "conversion.json", "quarantine.jsonl", content["file"]}
    for record in arrays.values():
        known.update(array_path("", record, part).as_posix() for part in parts_of(record))
    own = {*arrays, *(case_id for ids in manifest.split.values() for case_id in ids)}
    known.update(record_path("", name).as_posix() for name in own)
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    size_bytes = sum(record.image_bytes + record.label_bytes for record in arrays.values())
    strays = tuple(sorted(there - known))
    return Findings(tuple(dict.fromkeys(problems)), strays, len(manifest.cases), len(arrays), size_bytes)


# --- Private helpers ---


def _entry_problems(store: Store, record: CaseRecord, first: CaseRecord) -> List[str]:
    """What contradicts itself in one record, beside the first one with the same arrays, without reading them."""
    manifest, rule, problems = store.manifest, f"record of case {record.case_id}", []
    if record.channels != len(manifest.channels):
        problems.append(f"{rule} must have {len(manifest.channels)} channels, got {record.channels}; {ADVICE}")
    if not set(record.label_voxels) <= set(manifest.labels):
        problems.append(f"{rule} must have label codes of the store, got {[*record.label_voxels]}; {ADVICE}")
    other = ", ".join(name for name in OF_ARRAYS if getattr(record, name) != getattr(first, name))
    if other:
        rule = f"{rule} must say of its arrays what case {first.case_id} says of the same"
        problems.append(f"{rule}, got another {other}; {ADVICE}")
    return problems


def _array_problems(folder: Path, record: CaseRecord) -> List[str]:
    """All that is wrong with one case's arrays, its own record's file among it."""
    reader, own = Reader(folder, "pread"), record_path(folder, record.case_id)
    problems, lengths = [], reader.problems(record)
    try:
        found = "" if case_from_json(read_regular(own)) == record else "another"
    except (OSError, ValueError) as error:
        found = "" if isinstance(error, FileNotFoundError) else str(error)
    if found:
        rule = f"store file {own} must hold the case's record as the store does"
        problems.append(f"{rule}, got {found}; delete it")
    if lengths:
        return [*problems, *lengths]
    voxels: Dict[str, np.ndarray] = {}
    for part in parts_of(record):
        path = array_path(folder, record, part)
        try:
            if file_sha256(path) != (record.image_sha256 if part == "x" else record.label_sha256):
                problems.append(f"store file {path} must be as it was written, got other content; {ADVICE}")
                continue
            voxels[part] = on_grid(reader.array(record, part), record)
        except InputError as error:
            problems += error.problems
        except (OSError, ValueError, OverflowError, MemoryError) as error:  # the latter of impossible sizes
            problems.append(f"store file {path} must be readable: {error}")
    if problems:
        return problems
    if not voxels["x"].any(axis=(0, 1, 2)).all():
        return [f"image of case {record.case_id} must have voxels in every channel, got an empty one; {ADVICE}"]
    for name, value in facts_of(voxels["x"], voxels.get("y")).items():
        found, same = getattr(record, name), value == getattr(record, name)
        if name in ("channel_mean", "channel_std"):
            same = len(value) == len(found) and np.allclose(value, found, rtol=CLOSE, atol=CLOSE)
        if not same:
            rule = f"{name} in the record of case {record.case_id} must follow from its voxels, {_short(value)}"
            problems.append(f"{rule}, got {_short(found)}; {ADVICE}")
    return problems


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
