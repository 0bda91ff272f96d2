"""What a store holds, added up from its records alone: no array is opened."""

import math
from collections import Counter, defaultdict
from typing import Any, Dict, List, Mapping

from cpu3d.data.extent import EXTENTS, grid_size
from cpu3d.data.files.read_mode import choose_read_mode, file_system
from cpu3d.data.patients import describe_patients
from cpu3d.data.record_check import check_record
from cpu3d.data.records import SPLITS
from cpu3d.data.store import Store
from cpu3d.data.words import by, count
from cpu3d.errors import InputError
from cpu3d.util.progress import bar

MULTIPLE = 16
"""Of the grid, as `volume_dataset` rounds by default: four halvings."""

SHAPES_TOLD = 6
STEP = 1000
"""Records from one movement of the bar to the next: the bar takes longer than a record."""


def store_info(store: Store, *, free_bytes: int) -> Dict[str, Any]:
    """Everything about a store that its records tell, as JSON content. Bytes of shared arrays count once.

    `free_bytes`: memory that a run may use, for the read mode that would be chosen here. Raises InputError where a
    record is damaged.
    """
    manifest = store.manifest
    totals = _totals(store)
    train = {totals.stem_of[case_id] for case_id in manifest.split["train"]}
    needed_bytes = sum(totals.bytes_on_disk[stem] for stem in train)
    kind = file_system(store.folder)
    plans = {
        work: choose_read_mode(
            "auto", file_system=kind, needed_bytes=needed_bytes, free_bytes=free_bytes, patches=work == "patches"
        )
        for work in ("volumes", "patches")
    }
    return {
        "store": str(store.folder),
        "name": manifest.name,
        "layout": manifest.layout,
        "channels": list(manifest.channels),
        "labels": {str(code): name for code, name in manifest.labels.items()},
        "regions": {name: list(codes) for name, codes in manifest.regions.items()},
        "cases": len(manifest.cases),
        "patients": len(totals.patients),
        "patient_rules": dict(manifest.patient_rules),
        "arrays": len(totals.bytes_on_disk),
        "unlabelled": len(manifest.unlabelled),
        "split": {name: len(manifest.split[name]) for name in SPLITS},
        "split_seed": manifest.split_seed,
        "split_hash": manifest.split_hash,
        "formats": dict(totals.formats.most_common()),
        "cropped_cases": totals.cropped_cases,
        "bytes_on_disk": sum(totals.bytes_on_disk.values()),
        "bytes_unpacked": sum(totals.bytes_unpacked.values()),
        "shapes": {by(shape): n for shape, n in totals.shapes.most_common()},
        "largest_shape": list(manifest.largest_shape),
        "largest_box": list(manifest.largest_box),
        "grid": {extent: list(grid_size(store, extent=extent, multiple=MULTIPLE)) for extent in EXTENTS},
        "max_abs_error_std": totals.max_abs_error,
        "zeroed_voxels": totals.zeroed_voxels,
        "label_voxels": dict(sorted(totals.label_voxels.items(), key=lambda item: int(item[0]))),
        "label_cases": dict(sorted(totals.label_cases.items(), key=lambda item: int(item[0]))),
        "file_system": kind,
        "read": {work: {"mode": plan.mode, "reason": plan.reason} for work, plan in plans.items()},
        "versions": dict(manifest.versions),
    }


def lines_of(info: Mapping[str, Any]) -> List[str]:
    """`store_info` for people, without the labels."""
    shapes = [f"{shape} ({n})" for shape, n in info["shapes"].items()]
    more = len(shapes) - SHAPES_TOLD
    shared = "" if info["arrays"] == info["cases"] else f" sharing the arrays of {info['arrays']}"
    cropped = f", {info['cropped_cases']} cropped to the brain's box" if info["cropped_cases"] else ""
    error = info["max_abs_error_std"]
    patients = "; ".join(describe_patients(info["patient_rules"], info["cases"]))
    lines = [
        f"Store {info['store']}: {info['name']}, layout {info['layout']}",
        f"  cases    {info['cases']} of {count(info['patients'], 'patient')}{shared},"
        f" {info['unlabelled']} without a label",
        f"  patients {patients}",
        f"  split    {', '.join(f'{n} {name}' for name, n in info['split'].items())},"
        f" seed {info['split_seed']}, hash {info['split_hash']}",
        f"  channels {', '.join(info['channels'])}",
        f"  images   {', '.join(f'{n} {form}' for form, n in info['formats'].items())}{cropped};"
        f" {f'rounded by up to {error:.1g} std' if error else 'exact'}",
        f"  size     {info['bytes_on_disk'] / 1e6:,.1f} MB on disk, {info['bytes_unpacked'] / 1e6:,.1f} MB unpacked",
        f"  shapes   {', '.join(shapes[:SHAPES_TOLD])}{f' and {more} more' if more > 0 else ''}",
        f"  largest  grid {by(info['largest_shape'])}, brain's box {by(info['largest_box'])}",
        f"  network  sees {by(info['grid']['brain'])} of a case in extent brain, {by(info['grid']['full'])} in full",
    ]
    if info["zeroed_voxels"]:
        lines.append(f"  zeroed   {count(info['zeroed_voxels'], 'NaN or infinite voxel')} made background")
    return lines + [f"  {work:<8} read with {plan['reason']}" for work, plan in info["read"].items()]


# --- Private helpers ---


class _Totals:
    """What is added up over the records."""

    def __init__(self):
        self.patients = set()
        self.stem_of: Dict[str, str] = {}
        self.bytes_on_disk: Dict[str, int] = {}
        self.bytes_unpacked: Dict[str, int] = {}
        self.formats, self.shapes = Counter(), Counter()
        self.label_voxels, self.label_cases = defaultdict(int), Counter()
        self.cropped_cases = self.zeroed_voxels = 0
        self.max_abs_error = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count in a record as its JSON content. Raises what `check_record` does."""
        check_record(record)
        stem, shape = record["stem"], tuple(record["shape"])
        self.patients.add(record["patient_id"])
        self.stem_of[record["case_id"]] = stem
        self.bytes_on_disk[stem] = record["image_bytes"] + record["label_bytes"]
        voxel_bytes = 2 * len(record["channel_mean"]) + bool(record["label_voxels"])
        self.bytes_unpacked[stem] = math.prod(shape) * voxel_bytes
        self.formats[f"{record['image_dtype']} .{record['format']}"] += 1
        self.shapes[shape] += 1
        self.cropped_cases += tuple(record["stored"]["size"]) != shape
        self.zeroed_voxels += record["zeroed_voxels"]
        self.max_abs_error = max(self.max_abs_error, record["max_abs_error"])
        for code, voxels in record["label_voxels"].items():
            self.label_voxels[code] += voxels
            self.label_cases[code] += 1


def _totals(store: Store) -> _Totals:
    totals, cases = _Totals(), store.manifest.cases
    with bar("read records", total=len(cases)) as advance:
        for place in range(len(cases)):
            try:
                totals.add(cases.raw(place))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise InputError(
                    f"records of store {store.folder} must be complete, got {error!r} in line {place + 1};"
                    " see `store verify`"
                ) from None
            if (place + 1) % STEP == 0:
                advance(STEP)
        advance(len(cases) % STEP)
    return totals
