"""What `prepare` prints: what it found, and what became of it."""

import math
from collections import Counter
from pathlib import Path
from typing import Mapping

from cpu3d.data.layouts import Dataset, describe_labels
from cpu3d.data.patients import UNKNOWN, describe_patients
from cpu3d.data.records import SPLITS, Manifest
from cpu3d.data.resume import quarantined
from cpu3d.data.words import by, count
from cpu3d.data.write_cases import Settings


def announce(dataset: Dataset, settings: Settings, names: Mapping[int, str]) -> None:
    """What was found: cases, channels, patients and what each label code means; `names` are those in the files."""
    channels = ", ".join(dataset.channels)
    print(f"{dataset.name}: {count(dataset.cases, 'case')}, layout {dataset.layout}, channels {channels}")
    print("Labels and regions:")
    for line in describe_labels(dataset):
        print(f"  {line}")
    for old, new in sorted(settings.label_map.items()):
        name = f" {names[old]}" if old in names else ""
        print(f"  {old}{name} in the files is read as {new} {dataset.labels[new]}")
    print(f"Patients: {len({case.patient_id for case in dataset.cases})}")
    for line in describe_patients(Counter(dataset.patient_rules.values()), len(dataset.cases)):
        print(f"  {line}")
    if UNKNOWN in dataset.patient_rules.values():
        print("  where a patient has several cases, name them with --patients FILE: scores on them would be too good")
    if dataset.problems:
        incomplete = {problem.case_id for problem in dataset.problems}
        print(f"{count(incomplete, 'more case')} with a file missing or double: told at the end")


def summarise(manifest: Manifest, store_dir: Path) -> None:
    """What a store holds, and what was done to it that a user might not expect."""
    size_bytes = sum({case.stem: case.image_bytes + case.label_bytes for case in manifest.cases}.values())
    dtypes = Counter(case.image_dtype for case in manifest.cases)
    images = ", ".join(f"{n} {dtype}" for dtype, n in dtypes.items())
    error = max(case.max_abs_error for case in manifest.cases)
    shapes = sorted({case.shape for case in manifest.cases})
    print(f"Store {store_dir}: {count(manifest.cases, 'case')}, {size_bytes / 1e6:.0f} MB")
    print(f"  images   {images}; {f'rounded by up to {error:.1g} std' if error else 'exact'}")
    print(f"  shapes   {', '.join(map(by, shapes[:4]))}{', ...' if len(shapes) > 4 else ''}")
    zeroed = [case for case in manifest.cases if case.zeroed_voxels]
    if zeroed:
        voxels = sum(case.zeroed_voxels for case in zeroed)
        print(f"  zeroed   {count(voxels, 'NaN or infinite voxel')} in {count(zeroed, 'case')} made background")
    if any(case.stored.size != case.shape for case in manifest.cases):
        kept = sum(math.prod(case.stored.size) for case in manifest.cases)
        share = kept / sum(math.prod(case.shape) for case in manifest.cases)
        print(f"  crop     brains' boxes only, {share:.0%} of the voxels; all outside is 0 and comes back so")
    print(f"  brains   fit a box of {by(manifest.largest_box)}")
    print(f"  regions  {', '.join(manifest.regions)}")
    absent = [code for code in manifest.labels if not any(code in case.label_voxels for case in manifest.cases)]
    if absent:
        print(f"  absent   {', '.join(f'{code} {manifest.labels[code]}' for code in absent)}: in no case's label")
    patients = len({case.patient_id for case in manifest.cases})
    told = describe_patients(manifest.patient_rules, len(manifest.cases))
    print(f"  patients {patients}; {'; '.join(told)}")
    print(f"  split    {split_sizes(manifest)}, seed {manifest.split_seed}, hash {manifest.split_hash}")
    tell_quarantine(store_dir)


def tell_quarantine(store_dir: Path) -> None:
    bad = quarantined(store_dir)
    if bad:
        path = store_dir / "quarantine.jsonl"
        print(f"  left out {count(bad, 'bad case')}, see {path}; once mended they can be added with `store append`")


def split_sizes(manifest: Manifest) -> str:
    return ", ".join(f"{len(manifest.split[name])} {name}" for name in SPLITS)
