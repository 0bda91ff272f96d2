"""The patient of each case: from a table that a user gives, else from the case's name."""

import csv
import re
from pathlib import Path
from typing import Collection, Dict, List, Mapping, Tuple

from cpu3d.data.datasets.names import composed
from cpu3d.errors import InputError, raise_if_any
from cpu3d.util.records import count
from memory_estimator.common.files import read_text, reason

# Rules that tell a patient, beside those of PATIENT_NAMES.
TABLE = "table"
UNKNOWN = "not known from the name: each case counts as a patient of its own"

# Rule -> pattern of a case's name in any layout, whose group 1 is the patient.
PATIENT_NAMES = {
    "BraTS 2023 and later, <patient>-<time point>": r"(BraTS(?:-[a-z]+)+-\d+)-\d{1,3}(?!\d)",
    "BraTS 2017 to 2019, <patient>_<time point>": r"(BraTS1[5-9]_[^_]+_[^_]+)_\d+(?!\d)",
    "BraTS 2020 and 2021, one case a patient": r"(BraTS(?:20_[a-z]+|2021)_\d+)",
    "TCGA-<site>-<patient>": r"(TCGA-\w\w-\w{4})(?![a-z0-9])",
    "UCSF-PDGM-<patient>_": r"(UCSF-PDGM-\d{4})_",
    "BIDS, sub-<patient>": r"(sub-[a-z0-9]+)(?=_|-ses|$)",
    "OASIS, <patient>_MR": r"(OAS\d_?\d{4})_MR",
    "ADNI, <patient>": r"((?:ADNI_)?\d{3}_S_\d{4,5})(?!\d)",
    "PI-CAI, <patient>_<study>": r"(1\d{4})_1\d{6}(?!\d)",
    "autoPET, <patient>_<study>": r"((?:fdg|psma)_[0-9a-f]{8,})_",
    "<patient>_<time point> of its data set": (
        r"((?:(?:UPENN-GBM|UCSD-PTGBM|RHUH)-|BraTSReg_)\d+|training\d\d)_\d{1,2}(?!\d)"
    ),
    "<patient>_frame, _week, _session or another time point": (
        r"(\D*\d.*?)(?:[_-](?:"  # a patient has a digit, and nothing of it follows
        r"(?:frame|phase|day|week|month|ses|session|visit|time|time-?point|FU)[_-]?\d+[a-z]?"
        r"|week-\d{3}-\d|(?:TP|year|run)[_-]?\d\d?|(?:scan|study)[_-]?\d|M\d\d|V\d|T[03-9]"
        r"|(?:19|20)\d\d(?P<mark>[._-]?)(?:0[1-9]|1[0-2])(?P=mark)(?:0[1-9]|[12]\d|3[01])"
        r"|baseline|fu|follow[_-]?up[_-]?\d*|(?:(?:[sl]a|\dch)[_-])?E[DS]"
        r"|(?:pre|mid|post|intra)(?:[_-]?(?:op|RT|treatment|contrast))?"
        r"))+(?:_(?:brain|gt|nifti))?$"
    ),
}


def patient_of(case_id: str) -> Tuple[str, str]:
    """(patient, rule that tells it) from the name of a case, by PATIENT_NAMES; (case_id, UNKNOWN)
    if none matches."""
    for rule, pattern in PATIENT_NAMES.items():
        match = re.match(pattern, case_id, re.IGNORECASE)
        if match:
            return match[1], rule
    return case_id, UNKNOWN


def read_patients(path: Path, case_ids: Collection[str]) -> Dict[str, str]:
    """Case id -> patient from all lines of a table of two columns, separated by commas, semicolons
    or tabs.

    Raises InputError for a file that cannot be read, lines that are no pair, a case with two
    patients, and ids of `case_ids` without a patient."""
    name = f"--patients {path}"
    try:
        lines = read_text(path).splitlines()
        delimiter = next((mark for mark in "\t;" if any(mark in line for line in lines)), ",")
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter)]
    except (OSError, ValueError, csv.Error) as error:
        rule = f"{name} must be a table in UTF-8 that can be read"
        raise InputError(f"{rule}, got {reason(error)}; correct it") from None
    patients: Dict[str, str] = {}
    problems = []
    for number, row in enumerate(rows, 1):
        line = f"{name}:{number}"
        if not any(row):
            continue
        if len(row) != 2 or not all(row):
            problems.append(f"{line} must be a case and its patient, got {row}; correct the line")
            continue
        case_id, patient = map(composed, row)
        if patients.setdefault(case_id, patient) != patient:
            rule = f"{line} must give case {case_id} one patient"
            problems.append(f"{rule}, got {patient} too; keep one")
    raise_if_any(problems)
    raise_if_any(
        f"{name} must give case {case_id} a patient, got none; add a line"
        for case_id in sorted(set(case_ids) - set(patients))
    )
    return patients


def describe_patients(rules: Mapping[str, int]) -> List[str]:
    """Lines such as "3 cases: table". `rules`: rule that tells a case's patient -> number of
    cases."""
    return [f"{count(number, 'case')}: {rule}" for rule, number in rules.items()]
