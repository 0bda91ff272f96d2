"""Turn a data set of NIfTI volumes into a store that trains at the speed of memory.

Example: python -m cpu3d prepare --dataset Task01_BrainTumour --store store

Cases are converted in parallel and each is written whole or not at all. A run that was cut, by Ctrl-C, a full disk or a
lost machine, is continued by the same command; the manifest comes last and marks the store as finished.
"""

import argparse
import contextlib
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, Union

from cpu3d.data.label_map import parse_label_map, with_label_map
from cpu3d.data.layouts import Dataset, Problem, labels_in_use, read_dataset, regions_of
from cpu3d.data.records import CaseRecord, Manifest, make_manifest, remake
from cpu3d.data.resume import claimed, content_differences, finished_cases, kept, old_manifest
from cpu3d.data.splits import split_cases
from cpu3d.data.store import write_store
from cpu3d.data.summary import announce, split_sizes, summarise, tell_quarantine
from cpu3d.data.words import count
from cpu3d.data.write_cases import FORMAT_CHOICES, USUAL, Job, Settings, outcomes
from cpu3d.errors import InputError
from cpu3d.util.atomic import atomic_write
from cpu3d.util.child import worker_count
from cpu3d.util.progress import bar
from cpu3d.util.records import versions

Fractions = Tuple[float, float, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dataset", type=Path, required=True, help="folder in Decathlon or BraTS layout, or one BraTS case"
    )
    parser.add_argument(
        "--store", type=Path, required=True, help="folder to write; made if absent, continued if unfinished"
    )
    parser.add_argument(
        "--split",
        type=float,
        nargs=3,
        default=(0.8, 0.1, 0.1),
        metavar=("TRAIN", "VAL", "TEST"),
        help="shares of the patients (default: 0.8 0.1 0.1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the split (default: 0)")
    add_patients_argument(parser)
    parser.add_argument(
        "--format",
        choices=FORMAT_CHOICES,
        default="npy",
        help="npy: int16 where exact, else float16 z-scores, read without unpacking (default); float16: always those;"
        " b2nd: as npy, packed to a tenth, for slow disks and networks",
    )
    parser.add_argument("--crop", action="store_true", help="store each brain's box only; what is outside is 0")
    parser.add_argument(
        "--zero-nan", action="store_true", help="make NaN and infinite voxels background, and count them"
    )
    parser.add_argument(
        "--label-map",
        nargs="+",
        default=(),
        metavar="OLD=NEW",
        help="label codes to change while reading, such as 4=3 for BraTS 2021 in the codes of 2023",
    )
    parser.add_argument(
        "--workers", type=int, help="processes; each holds about two volumes (default: one per usable core)"
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave bad cases out and list them in quarantine.jsonl")
    parser.add_argument("--verify", action="store_true", help="check finished cases by hash, not only by size and date")


def run(args: argparse.Namespace) -> int:
    label_map = parse_label_map(args.label_map)
    prepare(
        args.dataset,
        args.store,
        fractions=tuple(args.split),
        seed=args.seed,
        workers=args.workers,
        skip_bad=args.skip_bad,
        verify=args.verify,
        settings=Settings(**FORMAT_CHOICES[args.format], crop=args.crop, zero_nan=args.zero_nan, label_map=label_map),
        patients=args.patients,
    )
    return 0


def add_patients_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--patients",
        type=Path,
        metavar="FILE",
        help="table of two columns, case and patient (CSV, or with semicolons or tabs), where names such as"
        " BraTS-GLI-00001-000 do not tell the patient; a patient's cases stay in one split",
    )


def prepare(
    dataset_dir: Union[str, Path],
    store_dir: Union[str, Path],
    *,
    fractions: Fractions = (0.8, 0.1, 0.1),
    seed: int = 0,
    workers: Optional[int] = None,
    skip_bad: bool = False,
    verify: bool = False,
    settings: Settings = USUAL,
    patients: Optional[Path] = None,
) -> Manifest:
    """Write the store of the data set in `dataset_dir` and return its manifest; print what is found and what was made.

    A finished case is not done again while it and its sources are as recorded: by size and date, or by hash with
    `verify`. `settings` say how arrays are made; a store is continued with its own only. `patients` is a table of the
    cases' patients, else their names tell them where they can; a finished store keeps those that it has. More than one
    worker means processes that import the calling script: guard its start with `if __name__ == "__main__"`.

    Raises InputError when cases are bad (all are told, the good ones are written, no manifest is) unless `skip_bad`,
    when the data set or the split is no good, when identical images fall into two splits, or when the store is
    another's or was begun with other settings. Raises
    OSError when writing fails, as on a full disk, and KeyboardInterrupt on Ctrl-C; finished cases are kept then too.
    """
    workers = worker_count(workers)
    found, store_dir = read_dataset(dataset_dir, patients), Path(store_dir)
    dataset = with_label_map(found, settings.label_map)
    announce(dataset, settings, found.labels)
    _split({case.case_id: case.patient_id for case in dataset.cases}, fractions, seed, dataset.problems)  # fail early
    with claimed(store_dir, dataset, settings):
        old = old_manifest(store_dir)
        if old is not None:
            _refuse_other_content(store_dir, old, dataset, fractions, seed, verify)
        wanted = {case.case_id: case.patient_id for case in (dataset if old is None else old).cases}
        cases = [
            dataclasses.replace(files, patient_id=wanted[files.case_id])
            for files in dataset.cases
            if files.case_id in wanted
        ]
        finished = finished_cases(store_dir, cases, dataset.folder, verify)
        if old is not None and len(finished) == len(wanted):
            print(f"Nothing to do: store {store_dir} is finished and unchanged.")
            tell_quarantine(store_dir)
            return old
        left = [files for files in cases if files.case_id not in finished]
        jobs = [Job(files, dataset.channels, dataset.labels, dataset.folder, store_dir, settings) for files in left]
        records, problems = convert_all(jobs, workers, finished, store_dir)
        if old is None:
            problems = sorted([*dataset.problems, *problems], key=lambda problem: problem.case_id)
        if problems and not (skip_bad and old is None):
            bad = count({problem.case_id for problem in problems}, "bad case")
            raise InputError(
                *(problem.reason for problem in problems),
                f"data set {dataset.folder} must be without bad cases, got {bad}; {count(records, 'good case')} kept"
                f" in {store_dir}: mend the bad and run again, or leave them out with --skip-bad",
            )
        if old is None:
            manifest = _manifest(dataset, records, fractions, seed, problems)
            write_quarantine(store_dir, problems)
        else:
            manifest = _mended(store_dir, old, records)
        write_store(store_dir, manifest)
    summarise(manifest, store_dir)
    return manifest


def convert_all(
    jobs: Sequence[Job], workers: int, finished: Dict[str, CaseRecord], store_dir: Path
) -> Tuple[Dict[str, CaseRecord], List[Problem]]:
    """Records of all good cases, the finished ones among them, and the problems of those that are bad."""
    records, problems = dict(finished), []
    results, total = outcomes(jobs, workers), len(jobs) + len(finished)
    with kept(records, "finished case", store_dir), contextlib.closing(results), bar("prepare", total=total) as advance:
        advance(len(finished))
        for job, outcome in results:
            if isinstance(outcome, CaseRecord):
                records[job.files.case_id] = outcome
            else:
                problems += [Problem(job.files.case_id, reason) for reason in outcome]
            advance()
    return records, problems


def write_quarantine(store_dir: Path, problems: Sequence[Problem]) -> None:
    """One JSON object a bad case; no file where there is none."""
    path = store_dir / "quarantine.jsonl"
    reasons: Dict[str, List[str]] = {}
    for problem in problems:
        reasons.setdefault(problem.case_id, []).append(problem.reason)
    if not reasons:
        path.unlink(missing_ok=True)
        return
    with atomic_write(path, "w") as file:
        for case_id, told in reasons.items():
            file.write(json.dumps({"case_id": case_id, "reasons": told}) + "\n")


# --- Private helpers ---


def _split(patients: Dict[str, str], fractions: Fractions, seed: int, problems: Sequence[Problem]):
    """`split_cases`, telling the bad cases too where too few are left."""
    try:
        return split_cases(patients, fractions=fractions, seed=seed)
    except InputError as error:
        raise InputError(*(problem.reason for problem in problems), *error.problems) from None


def _manifest(
    dataset: Dataset, records: Dict[str, CaseRecord], fractions: Fractions, seed: int, problems: Sequence[Problem]
) -> Manifest:
    cases = tuple(records[case_id] for case_id in sorted(records))
    labels = labels_in_use(dataset.layout, dataset.labels, {code for case in cases for code in case.label_voxels})
    return make_manifest(
        name=dataset.name,
        layout=dataset.layout,
        channels=dataset.channels,
        labels=labels,
        regions=regions_of(labels),
        split=_split({case.case_id: case.patient_id for case in cases}, fractions, seed, problems),
        split_seed=seed,
        cases=cases,
        versions=versions(),
        patient_rules=Counter(dataset.patient_rules[case.case_id] for case in cases),
    )


def _mended(store_dir: Path, old: Manifest, records: Dict[str, CaseRecord]) -> Manifest:
    """A finished store's manifest once damaged cases were made again: the voxels must be what they were.

    The files may differ: another version of a library may pack the same voxels differently.
    """
    other = [
        f"case {case.case_id} of {store_dir} must get back the voxels that it had, got others"
        for case in old.cases
        if _voxels(records[case.case_id]) != _voxels(case)
    ]
    if other:
        raise InputError(*other, "use the versions in manifest.json that made the store, or make another --store")
    return remake(old, cases=tuple(records.values()))


def _voxels(record: CaseRecord) -> Tuple[str, str]:
    return record.image_voxels_sha256, record.label_voxels_sha256


def _refuse_other_content(
    store_dir: Path, old: Manifest, dataset: Dataset, fractions: Fractions, seed: int, verify: bool
) -> None:
    """A finished store is fixed: raise, naming every difference, where this run would make another one of it."""
    differences = content_differences(store_dir, old, dataset, verify)
    patients = {case.case_id: case.patient_id for case in old.cases}
    if seed != old.split_seed or _split(patients, fractions, seed, ()) != old.split:
        differences.append(f"--split and --seed ask for another split than {split_sizes(old)}, seed {old.split_seed}")
    if differences:
        rule = f"store {store_dir} is finished and must keep its content"
        raise InputError(
            *(f"{rule}, but {difference}" for difference in differences),
            "give another --store for the new content, or add new cases with `store append`; the finished store is"
            " untouched",
        )
