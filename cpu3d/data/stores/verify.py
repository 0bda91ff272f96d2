"""What a store holds, from its records alone (`store_info`), and whether it is that, voxel by voxel (`verify`)."""

import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import numpy as np

from cpu3d.data.files.arrays import file_sha256
from cpu3d.data.files.reader import Reader, choose_read_mode, file_system, parts_of
from cpu3d.data.records import CaseRecord, array_path, case_from_json, record_path, remake, to_json
from cpu3d.data.splits import describe_patients
from cpu3d.data.store import Store, on_grid, open_store, read_manifest
from cpu3d.data.stores.case import facts_of
from cpu3d.errors import InputError
from cpu3d.util.child import KILLED, run_jobs, worker_count
from cpu3d.util.progress import bar
from cpu3d.util.records import by, count
from memory_estimator.files import read_regular
from memory_estimator.table import Table

OF_ENTRY = ("case_id", "patient_id", "geometry", "spacing_mm", "sources", "zeroed_voxels")
"""Fields of a record that say something of the entry."""

OF_ARRAYS = tuple(field.name for field in dataclasses.fields(CaseRecord) if field.name not in OF_ENTRY)
"""Those that say something of its arrays, which entries may share."""

CLOSE = 1e-9
"""Relative difference of a mean or deviation that another NumPy may make, by adding up in another order."""

SHAPES_SHOWN = 6

ADVICE = "restore it, or make the case anew with `prepare --verify`"

# --- What it holds ---


def store_info(store: Store, *, free_bytes: int) -> Dict[str, Any]:
    """Everything about a store that its records tell, as JSON content. Bytes of shared arrays count once.

    `free_bytes`: memory that a run may use, for the read mode that would be chosen here. Raises InputError where a
    record is damaged.
    """
    manifest, patients, on_disk, error = store.manifest, set(), {}, 0.0
    formats, shapes, cases, voxels, sums = Counter(), Counter(), Counter(), Counter(), Counter()
    for record in manifest.cases:
        patients.add(record.patient_id)
        on_disk[record.stem] = record.image_bytes + record.label_bytes
        formats[f"{record.image_dtype} .{record.format}"] += 1
        shapes[by(record.shape)] += 1
        cases.update(list(record.label_voxels))
        voxels.update(record.label_voxels)
        sums.update(cropped=record.stored.size != record.shape, zeroed=record.zeroed_voxels)
        error = max(error, record.max_abs_error)
    needed_bytes = sum(on_disk[stem] for stem in {record.stem for record in store.cases("train")})
    facts = {"file_system": file_system(store.folder), "needed_bytes": needed_bytes, "free_bytes": free_bytes}
    plans = {work: choose_read_mode(None, **facts, patches=work == "patches") for work in ("volumes", "patches")}
    return {
        **to_json(manifest),
        "store": str(store.folder),
        "cases": len(manifest.cases),
        "patients": len(patients),
        "arrays": len(on_disk),
        "unlabelled": len(manifest.unlabelled),
        "split": {name: len(ids) for name, ids in manifest.split.items()},
        "formats": dict(formats.most_common()),
        "cropped_cases": sums["cropped"],
        "bytes_on_disk": sum(on_disk.values()),
        "shapes": dict(shapes.most_common()),
        "max_abs_error_std": error,
        "zeroed_voxels": sums["zeroed"],
        "label_voxels": dict(sorted(voxels.items())),
        "label_cases": dict(sorted(cases.items())),
        "file_system": facts["file_system"],
        "read": {work: {"mode": plan.mode, "reason": plan.reason} for work, plan in plans.items()},
    }


def lines_of(info: Mapping[str, Any]) -> List[str]:
    """`store_info` for people, without the labels."""
    shapes = [f"{shape} ({n})" for shape, n in info["shapes"].items()]
    more = f" and {len(shapes) - SHAPES_SHOWN} more" if len(shapes) > SHAPES_SHOWN else ""
    shared = "" if info["arrays"] == info["cases"] else f" sharing the arrays of {info['arrays']}"
    cropped = f", {info['cropped_cases']} cropped to the brain's box" if info["cropped_cases"] else ""
    error = f"rounded by up to {info['max_abs_error_std']:.1g} std" if info["max_abs_error_std"] else "exact"
    split = ", ".join(f"{n} {name}" for name, n in info["split"].items())
    absent = ", ".join(f"{code} {name}" for code, name in info["labels"].items() if code not in info["label_voxels"])
    zeroed = count(info["zeroed_voxels"], "NaN or infinite voxel")
    lines = {
        "cases": f"{info['cases']} of {count(info['patients'], 'patient')}{shared}, {info['unlabelled']} unlabelled",
        "patients": "; ".join(describe_patients(info["patient_rules"], info["cases"])),
        "split": f"{split}, seed {info['split_seed']}, hash {info['split_hash']}",
        "channels": ", ".join(info["channels"]),
        "images": f"{', '.join(f'{n} {form}' for form, n in info['formats'].items())}{cropped}; {error}",
        "size": f"{info['bytes_on_disk'] / 1e6:,.1f} MB on disk",
        "shapes": f"{', '.join(shapes[:SHAPES_SHOWN])}{more}",
        "largest": f"grid {by(info['largest_shape'])}, brain's box {by(info['largest_box'])}",
        "absent": f"{absent}: in no case's label" if absent else "",
        "zeroed": f"{zeroed} made background" if info["zeroed_voxels"] else "",
        **{work: f"read with {plan['reason']}" for work, plan in info["read"].items()},
    }
    head = f"Store {info['store']}: {info['name']}, layout {info['layout']}"
    return [head, *(f"  {name:<8} {line}" for name, line in lines.items() if line)]


def label_table(info: Mapping[str, Any]) -> Table:
    """The labels of `store_info`: in which regions and how many cases they are, and their shares of the voxels."""
    voxels, rows = info["label_voxels"], []
    total, background = sum(voxels.values()), voxels.get(0, 0)
    for code, name in sorted(info["labels"].items()):
        regions = ", ".join(region for region, codes in info["regions"].items() if code in codes)
        own = voxels.get(code, 0)
        of_foreground = f"{own / (total - background):.1%}" if total > background and code else "-"
        of_all = f"{own / total:.3%}" if total else "-"
        cases = str(info["label_cases"].get(code, 0))
        rows.append((f"{code} {name}", regions or "-", cases, f"{own:,}", of_all, of_foreground))
    return Table(("label", "in regions", "cases", "voxels", "of all", "foreground"), rows, names=2)


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
    problems, records, arrays = [], [], {}
    if file_sha256(folder / content["file"]) != content["sha256"]:
        rule = f"store file {folder / content['file']} must be as it was written"
        problems.append(f"{rule}, got other content; run `prepare` again")
    for place in range(len(manifest.cases)):
        try:
            records.append(manifest.cases[place])
        except InputError as error:
            problems += error.problems
            continue
        problems += _entry_problems(store, records[-1], arrays.setdefault(records[-1].stem, records[-1]))
    try:
        # What follows from damaged records is not known.
        again = remake(manifest, cases=records) if len(records) == len(manifest.cases) > 0 else manifest
        for name in ("largest_shape", "largest_box", "unlabelled", "split_hash"):
            if getattr(manifest, name) != getattr(again, name):
                rule = f"{name} in the manifest of store {folder} must follow from its records"
                problems.append(f"{rule}, got {_short(getattr(manifest, name))}; restore it")
    except InputError as error:
        problems += error.problems
    with bar("verify", total=len(arrays)) as advance:
        for record, found in run_jobs(functools.partial(_array_problems, folder), list(arrays.values()), workers):
            killed = f"case {record.case_id} must fit into memory, but its process was killed; free some"
            problems += [killed] if found is KILLED else found
            advance()
    own = {*arrays, *(case_id for ids in manifest.split.values() for case_id in ids)}
    known = {"manifest.json", "source.json", "conversion.json", "quarantine.jsonl", content["file"]}
    known.update(record_path("", name).as_posix() for name in own)
    known.update(array_path("", one, part).as_posix() for one in arrays.values() for part in parts_of(one))
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    read = sum(record.image_bytes + record.label_bytes for record in arrays.values())
    found = tuple(dict.fromkeys(problems)), tuple(sorted(there - known))
    return Findings(*found, len(manifest.cases), len(arrays), read)


# --- Private helpers ---


def _entry_problems(store: Store, record: CaseRecord, first: CaseRecord) -> List[str]:
    """What contradicts itself in one record, beside the first one with the same arrays, without reading them."""
    manifest = store.manifest
    other = ", ".join(name for name in OF_ARRAYS if getattr(record, name) != getattr(first, name))
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
        if own.exists() and case_from_json(read_regular(own)) != record:
            problems.append(f"store file {own} must hold the case's record as the store does, got another; delete it")
    except (OSError, ValueError) as error:
        problems.append(f"store file {own} must hold the case's record, got {error}; delete it")
    return problems


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
