"""What is said of cases that can be used, and may not be what they seem."""

import re
import statistics
from collections import Counter
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data import nifti
from cpu3d.data.cases.channels import AS_IT_IS
from cpu3d.data.cases.resample import in_mm
from cpu3d.data.datasets.dataset import Problems
from cpu3d.data.manifest import CaseRecord, Manifest
from cpu3d.data.normalise import PERCENTILES, Normalisation
from cpu3d.data.region import Array
from cpu3d.util.records import count, listed

NAMED = 3  # cases that a note names
NOTED_ERROR = 0.05  # in deviations: more than the noise of a scanner
EXAMINED_VOXELS = 10**6  # of a channel that is compared with its window
WINDOW_MARGIN = 0.05  # share of a window that the least values may be above its lower end
SHIFT_HU = 1024  # that files of some scanners add, so that no value is below 0
# That a shift between the labelled values of a case and those of most is more or less than 1024:
# as much as contrast medium makes of one tissue. Bone and fat, of cases labelled in part, differ by
# 800, lungs and soft tissue by 900.
SHIFT_MARGIN_HU = 100
_NUMBER = re.compile(r"(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?")  # not the 1 of T1


def case_notes(
    record: CaseRecord, channels: Sequence[str], ignore: Optional[int] = None
) -> List[str]:
    """Say what is unusual about a case: its files' orientation, voxels that were filled, brought
    nearer or rounded, channels whose background is not 0, and codes but `ignore` that
    resampling has lost."""
    notes = list(record.contradictions)
    if not nifti.is_placed(record.geometry):
        notes.append(nifti.orientation_note(record.geometry))
    if record.zeroed_voxels:
        nothing = count(record.zeroed_voxels, "NaN or infinite voxel")
        notes.append(f"{nothing} were taken as what surrounds the volume")
    if record.far_voxels:
        far = count(record.far_voxels, "voxel")
        notes.append(f"{far} far out of the range of all others were taken as their neighbours are")
    if record.max_abs_error > NOTED_ERROR:
        rule = f"values are rounded by up to {record.max_abs_error:.2g} deviations"
        notes.append(f"{rule}, as they reach far beyond most of them; repair the image")
    source = record.resampled_from
    for code, voxels in source.label_voxels.items() if source else ():
        if code != ignore and code not in record.label_voxels:
            sizes = in_mm(record.spacing_mm)
            rule = f"label {code} ({count(voxels, 'voxel')}) is too small for voxels of {sizes}"
            notes.append(f"{rule}: it is not in the label that is learnt, but in the scores")
    names: Dict[str, List[str]] = {}  # value -> channels
    for name, border in zip(channels, record.background):
        if border:
            names.setdefault(f"{border:.3g}", []).append(name)
    for value, alike in names.items():
        rule = f"most of the border of {listed(alike)} is about {value}, and only 0 is background"
        notes.append(f"{rule}: the content box is the whole grid; make it 0 if nothing is there")
    return notes


def notes_of_store(manifest: Manifest) -> Dict[str, List[str]]:
    """Say what is unusual about the cases of a store, by case id."""
    units = unit_notes(manifest.cases, manifest.channels)
    notes = {}
    for case in manifest.cases:
        own = case_notes(case, manifest.channels, manifest.ignore)
        notes[case.case_id] = [*own, *units.get(case.case_id, ())]
    return notes


def absent_regions(
    records: Iterable[CaseRecord], regions: Mapping[str, Sequence[int]]
) -> Tuple[str, ...]:
    """List the regions, name -> label codes, that no case has a voxel of."""
    absent = dict(regions)
    for record in records:
        for name, codes in list(absent.items()):
            if not record.label_voxels.keys().isdisjoint(codes):
                del absent[name]
        if not absent:
            break
    return tuple(absent)


def left_out_of_mean(
    records: Iterable[CaseRecord], regions: Mapping[str, Sequence[int]]
) -> Tuple[str, ...]:
    """List the regions whose Dice is not in the mean of a validation, as no held-out case has
    them; none if no region is in any."""
    absent = absent_regions(records, regions)
    return () if len(absent) == len(regions) else absent


def absence_line(absent: Sequence[str], regions: Mapping[str, Sequence[int]], where: str) -> str:
    """Warn that the training cases of `where` have none of some regions; "" if they have all."""
    if not absent:
        return ""
    if len(absent) == len(regions):
        rule = f"training cases of {where} must have labelled voxels, got none of any region"
        return f"warning: {rule}: nothing can be learnt; check the label files and their codes"
    names = listed(f"{name} (label {', '.join(map(str, regions[name]))})" for name in absent)
    rule = f"training cases of {where} must have every region to learn it, got none of {names}"
    other = "take another --split if other cases have it"
    return f"warning: {rule}; {other}, or leave such regions out with --regions"


def note_lines(notes: Mapping[str, Iterable[str]]) -> List[str]:
    """Print notes by case id as lines: one for each text, with the ids of the first cases. Texts
    that differ in numbers alone, as in each case's own spacing, share a line with the first
    one's numbers if they are more than a few."""
    alike: Dict[str, Dict[str, List[str]]] = {}  # text without its numbers -> text -> case ids
    for case_id, texts in notes.items():
        for text in texts:
            alike.setdefault(_NUMBER.sub("#", text), {}).setdefault(text, []).append(case_id)
    lines = []
    for ids_of in alike.values():
        if len(ids_of) > NAMED:
            first = next(iter(ids_of))
            joined = [case_id for ids in ids_of.values() for case_id in ids]
            ids_of = {f"{first} (numbers of {joined[0]})": joined}
        for text, ids in ids_of.items():
            names = ids[:NAMED]
            if len(ids) > NAMED:
                names.append(f"{len(ids) - NAMED} more")
            lines.append(f"note: {listed(names)}: {text}")
    return lines


def mixed_orientation(
    new: Iterable[CaseRecord],
    in_store: Iterable[CaseRecord] = (),
) -> Problems:
    """Name the cases that give an orientation where the others give none, or the other way round:
    left and right may be exchanged between them. The others are those of the store, else the
    larger group; of two equal ones, those with an orientation."""
    placed = {record.case_id: nifti.is_placed(record.geometry) for record in new}
    others = Counter(nifti.is_placed(record.geometry) for record in in_store)
    if not others:
        others = Counter(placed.values())
    wanted = others[True] >= others[False]
    must = "must" if wanted else "must not"
    rule = f"{must} give the patient's orientation, as {count(others[wanted], 'other case')}"
    got = "sform and qform codes of 0" if wanted else "sform or qform codes above 0"
    advice = "correct its header, or leave it out: left and right may be exchanged between them"
    odd = [case_id for case_id, has in placed.items() if has != wanted]
    return {case_id: [f"case {case_id} {rule}, got {got}; {advice}"] for case_id in odd}


def unit_notes(records: Iterable[CaseRecord], channels: Sequence[str]) -> Dict[str, List[str]]:
    """Note, by case id, each CT whose labelled values are in another unit than those of most
    cases, as HU + 1024 among HU."""
    middles: Dict[str, Dict[str, float]] = {}  # channel -> case id -> median of labelled values
    for record in records:
        for name, values in zip(channels, record.foreground):
            if values:
                middles.setdefault(name, {})[record.case_id] = float(np.median(values))
    notes: Dict[str, List[str]] = {}
    for name, of_cases in middles.items():
        usual = statistics.median_low(of_cases.values())
        for case_id, middle in of_cases.items():
            # One alone in HU + 1024, or one alone in HU.
            if abs(abs(middle - usual) - SHIFT_HU) <= SHIFT_MARGIN_HU:
                got = f"labelled values of {name} about {middle:.4g}"
                others = f"of most cases they are about {usual:.4g}"
                note = f"{got}, {others}: they may be in another unit, as HU + 1024"
                notes.setdefault(case_id, []).append(note)
    return notes


def window_notes(
    image: Array,
    record: CaseRecord,
    channels: Sequence[str],
    normalisation: Sequence[Normalisation],
) -> List[str]:
    """Note each CT of a case whose values do not fit the window of the training, as HU + 1024 with
    a window in HU."""
    notes = []
    units = record.units or (AS_IT_IS,) * len(channels)
    for index, (name, each) in enumerate(zip(channels, normalisation)):
        if each.low is None or each.high is None:
            continue
        step, offset = units[index]
        values = image[..., index].ravel()
        values = values[:: max(values.size // EXAMINED_VOXELS, 1)] * step + offset
        least, most = np.percentile(values, PERCENTILES).tolist()
        margin = WINDOW_MARGIN * (each.high - each.low)
        middle = np.median(values[values >= min(each.low, most)])
        # Muscle, at about 50 HU, is above a window of fat, of lungs or of airways, too.
        is_above = middle > max(each.high, 0) + SHIFT_HU / 2
        if each.low + margin < least or most < each.low or is_above:
            got = f"values of {name} from {least:.4g} to {most:.4g} (0.5th to 99.5th percentile)"
            window = f"the training's window from {each.low:.4g} to {each.high:.4g}"
            notes.append(f"{got} do not fit {window}: they may be in another unit, as HU + 1024")
    return notes
