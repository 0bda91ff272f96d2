"""Which patient a case is of: from a table, else from its name, else not known. A patient's cases stay in one split."""

import csv
import re
from pathlib import Path
from typing import Collection, Dict, List, Mapping, Tuple

from cpu3d.data.words import count
from cpu3d.errors import InputError
from memory_estimator.files import read_regular

TABLE = "table"
UNKNOWN = "not known from the name: each case counts as a patient of its own"

_BRATS = {
    "BraTS 2023 and later, <patient>-<time point>": r"(BraTS(?:-[a-z]+)+-\d+)-\d{1,3}(?!\d)",
    "BraTS 2017 to 2019, <patient>_<time point>": r"(BraTS1[5-9]_[^_]+_[^_]+)_\d+(?!\d)",
    "BraTS 2020 and 2021, one case a patient": r"(BraTS(?:20_[a-z]+|2021)_\d+)",
    "TCGA-<site>-<patient>": r"(TCGA-\w\w-\w{4})(?![a-z0-9])",
}
"""Names in any layout -> the patient in them, as group 1; what follows, such as a modality, is ignored."""

_LAYOUTS = {"brats2023": {"layout brats2023, <patient>-<time point>": r"(.+)-\d{3}$"}}
"""Layout -> names of other data sets' cases in it."""


def patient_of(case_id: str, layout: str) -> Tuple[str, str]:
    """(patient, the rule that tells it) from the name of a case; (the case itself, UNKNOWN) where that says nothing."""
    for rule, pattern in {**_BRATS, **_LAYOUTS.get(layout, {})}.items():
        found = re.match(pattern, case_id, re.IGNORECASE)
        if found:
            return found[1], rule
    return case_id, UNKNOWN


def read_patients(path: Path, case_ids: Collection[str]) -> Dict[str, str]:
    """Case id -> patient from a table of two columns, separated by commas, semicolons or tabs.

    All of its lines, a header among them, and at least `case_ids`. Raises InputError for a file that cannot be read,
    for lines that are no pair, and for a case of `case_ids` that has no patient or two.
    """
    try:
        lines = read_regular(path).decode("utf-8-sig").splitlines()
        delimiter = next((mark for mark in "\t;" if any(mark in line for line in lines)), ",")
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter)]
    except OSError as error:
        raise InputError(f"--patients {path} must be a file that can be read, got {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise InputError(f"--patients {path} must be a table in UTF-8, got {error}; mend it") from None
    patients: Dict[str, str] = {}
    problems = []
    for number, row in enumerate(rows, 1):
        if not any(row):
            continue
        if len(row) != 2 or not all(row):
            problems.append(f"--patients {path}:{number} must be a case and its patient, got {row}; mend the line")
        elif patients.setdefault(*row) != row[1]:
            problems.append(
                f"--patients {path}:{number} must give case {row[0]} one patient, got {patients[row[0]]} and {row[1]}"
            )
    lacking = sorted(set(case_ids) - set(patients))
    if lacking and not problems:
        problems = [
            f"--patients {path} must give case {case_id} a patient, got none; add a line" for case_id in lacking
        ]
    if problems:
        raise InputError(*problems)
    return patients


def describe_patients(rules: Mapping[str, int], cases: int) -> List[str]:
    """How the patients of `cases` are known, a line a rule, such as "3 cases: table". `rules`: rule -> its cases."""
    told = {**rules, "not recorded": cases - sum(rules.values())}
    return [f"{count(number, 'case')}: {rule}" for rule, number in told.items() if number]
