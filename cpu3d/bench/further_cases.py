"""Further labelled cases that are in no store: found in their folders, and scored once predicted.

cases = further_cases([Path("TCGA-DU-7294")], store)
scored_cases(cases, predictions, ["WT", "TC", "ET"])
"""

from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from cpu3d.data.labels import ignored_voxels, region_mask
from cpu3d.data.manifest import case_list
from cpu3d.data.nifti import ras_steps_mm
from cpu3d.data.store import Store
from cpu3d.errors import InputError, raise_if_any
from cpu3d.inference.scores import score_region
from cpu3d.report.view import read_case, viewed_files
from cpu3d.util.records import listed


def further_cases(folders: Sequence[Path], store: Store) -> Dict[str, Path]:
    """Case id -> folder of further cases. Raises InputError for folders that are not of a labelled
    case, and for cases of the store, which are not untouched."""
    cases: Dict[str, Path] = {}
    problems = []
    own = {known.case_id for known in case_list(store.manifest.cases).known}
    for folder in folders:
        rule = f"--also {folder} must be the folder of a labelled case that is not in the store"
        try:
            files = viewed_files([folder.resolve()])
        except InputError as error:
            problems.append(f"{rule}, got no case: {error.problems[0]}")
            continue
        if files.label is None or not folder.is_dir():
            problems.append(f"{rule}, got no label; name a case folder with a segmentation")
        elif files.case_id in own:
            problems.append(f"{rule}, got {files.case_id} of {store.folder}; leave it out")
        elif files.case_id in cases:
            problems.append(f"{rule}, got {files.case_id} twice; name it once")
        cases[files.case_id] = folder.resolve()
    raise_if_any(problems)
    return cases


def scored_cases(
    cases: Mapping[str, Path],
    predictions: Path,
    regions: Sequence[str],
    ignore: Optional[int] = None,
) -> List[Dict[str, Any]]:
    """Each case and its scores, as "cases" of scores.json: of `predictions`/<case_id>.nii.gz, a
    label map in the codes of the case's own label. `ignore` is the code of voxels that are not
    scored, where a label's name does not say so. Raises InputError if there is no such region.
    """
    scored = []
    for case_id, folder in cases.items():
        case = read_case([folder], None, [predictions / f"{case_id}.nii.gz"])
        (label,) = case.predictions.values()
        lacking = [region for region in regions if region not in case.regions]
        if lacking:
            rule = f"codes of case {case_id} must have the regions {listed(regions)}"
            raise InputError(f"{rule}, got none of {listed(lacking)}; leave it out of --also")
        steps_mm = ras_steps_mm(case.geometry)
        own = ignore if case.ignore is None else case.ignore
        ignored = ignored_voxels(case.truth, own)
        scores = {}
        for region in regions:
            codes = case.regions[region]
            masks = region_mask(case.truth, codes), region_mask(label, codes)
            scores[region] = score_region(*masks, steps_mm, ignored=ignored)
        scored.append({"case_id": case_id, "regions": scores})
    return scored
