"""Turn a data set of NIfTI volumes into a store that trains at the speed of memory.

Example: python -m cpu3d prepare --dataset Task01_BrainTumour --store store

Cases are converted in parallel and each is written whole or not at all. A run that was cut, by Ctrl-C, a full disk or a
lost machine, is continued by the same command; the manifest comes last and marks the store as finished.
"""

import argparse
import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Sized, Tuple, Union

from cpu3d.atomic import atomic_write, write_json
from cpu3d.data.convert import Job, outcomes
from cpu3d.data.layouts import Dataset, Problem, describe_labels, read_dataset
from cpu3d.data.resume import claimed, content_differences, finished_cases, old_manifest, quarantined, sweep
from cpu3d.data.splits import split_cases
from cpu3d.data.store import SPLITS, CaseRecord, Manifest, to_json
from cpu3d.errors import InputError
from cpu3d.progress import bar
from cpu3d.versions import versions
from cpu3d.workers import worker_count

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
    parser.add_argument(
        "--workers", type=int, help="processes; each holds about two volumes (default: one per usable core)"
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave bad cases out and list them in quarantine.jsonl")
    parser.add_argument("--verify", action="store_true", help="check finished cases by hash, not only by size and date")


def run(args: argparse.Namespace) -> int:
    prepare(
        args.dataset,
        args.store,
        fractions=tuple(args.split),
        seed=args.seed,
        workers=args.workers,
        skip_bad=args.skip_bad,
        verify=args.verify,
    )
    return 0


def prepare(
    dataset_dir: Union[str, Path],
    store_dir: Union[str, Path],
    *,
    fractions: Fractions = (0.8, 0.1, 0.1),
    seed: int = 0,
    workers: Optional[int] = None,
    skip_bad: bool = False,
    verify: bool = False,
) -> Manifest:
    """Write the store of the data set in `dataset_dir` and return its manifest; print what is found and what was made.

    A finished case is not done again while it and its sources are as recorded: by size and date, or by hash with
    `verify`. More than one worker means processes that import the calling script: guard its start with
    `if __name__ == "__main__"`.

    Raises InputError when cases are bad (all are told, the good ones are written, no manifest is) unless `skip_bad`,
    when the data set or the split is no good, or when the store is another's. Raises OSError when writing fails, as on
    a full disk, and KeyboardInterrupt on Ctrl-C; finished cases are kept then too.
    """
    workers = worker_count(workers)
    dataset, store_dir = read_dataset(dataset_dir), Path(store_dir)
    _announce(dataset)
    _split({case.case_id: case.patient_id for case in dataset.cases}, fractions, seed, dataset.problems)  # fail early
    with claimed(store_dir, dataset):
        old = old_manifest(store_dir)
        if old is not None:
            _refuse_other_content(store_dir, old, dataset, fractions, seed, verify)
        wanted = {case.case_id for case in (dataset if old is None else old).cases}
        cases = [files for files in dataset.cases if files.case_id in wanted]
        finished = finished_cases(store_dir, cases, dataset.folder, verify)
        if old is not None and len(finished) == len(wanted):
            print(f"Nothing to do: store {store_dir} is finished and unchanged.")
            _tell_quarantine(store_dir)
            return old
        left = [files for files in cases if files.case_id not in finished]
        jobs = [Job(files, dataset.channels, dataset.labels, dataset.folder, store_dir) for files in left]
        records, problems = _convert_all(jobs, workers, finished, store_dir)
        manifest = old
        if old is None:
            problems = sorted([*dataset.problems, *problems], key=lambda problem: problem.case_id)
        if problems and not (skip_bad and old is None):
            bad = _count({problem.case_id for problem in problems}, "bad case")
            raise InputError(
                *(problem.reason for problem in problems),
                f"data set {dataset.folder} must be without bad cases, got {bad}; {_count(records, 'good case')} kept"
                f" in {store_dir}: mend the bad and run again, or leave them out with --skip-bad",
            )
        if old is None:
            manifest = _manifest(dataset, records, fractions, seed, problems)
            _write_quarantine(store_dir, problems)
            write_json(store_dir / "manifest.json", to_json(manifest))
    _summarise(manifest, store_dir)
    return manifest


# --- Private helpers: the work ---


def _split(patients: Dict[str, str], fractions: Fractions, seed: int, problems: Sequence[Problem]):
    """`split_cases`, telling the bad cases too where too few are left."""
    try:
        return split_cases(patients, fractions=fractions, seed=seed)
    except InputError as error:
        raise InputError(*(problem.reason for problem in problems), *error.problems) from None


def _convert_all(
    jobs: Sequence[Job], workers: int, finished: Dict[str, CaseRecord], store_dir: Path
) -> Tuple[Dict[str, CaseRecord], List[Problem]]:
    """Records of all good cases, the finished ones among them, and the problems of those that are bad."""
    records, problems = dict(finished), []
    results = outcomes(jobs, workers)
    try:
        with contextlib.closing(results), bar("prepare", total=len(jobs) + len(finished)) as advance:
            advance(len(finished))
            for job, outcome in results:
                if isinstance(outcome, CaseRecord):
                    records[job.files.case_id] = outcome
                else:
                    problems += [Problem(job.files.case_id, reason) for reason in outcome]
                advance()
    except OSError as error:
        told = f"writing stopped, {error.strerror}; {_count(records, 'finished case')} kept"
        advice = "make room or mend access and run the same command again"
        raise OSError(error.errno, f"{told}, {advice}", str(store_dir)) from error
    except KeyboardInterrupt:
        told = f"{_count(records, 'finished case')} kept in {store_dir}"
        raise KeyboardInterrupt(f"{told}; run the same command again to continue") from None
    finally:
        sweep(store_dir)
    return records, problems


def _manifest(
    dataset: Dataset, records: Dict[str, CaseRecord], fractions: Fractions, seed: int, problems: Sequence[Problem]
) -> Manifest:
    cases = tuple(records[case_id] for case_id in sorted(records))
    return Manifest(
        name=dataset.name,
        layout=dataset.layout,
        channels=dataset.channels,
        labels=dataset.labels,
        regions=dataset.regions,
        split=_split({case.case_id: case.patient_id for case in cases}, fractions, seed, problems),
        split_seed=seed,
        cases=cases,
        versions=versions(),
    )


def _write_quarantine(store_dir: Path, problems: Sequence[Problem]) -> None:
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


def _refuse_other_content(
    store_dir: Path, old: Manifest, dataset: Dataset, fractions: Fractions, seed: int, verify: bool
) -> None:
    """A finished store is fixed: raise, naming every difference, where this run would make another one of it."""
    differences = content_differences(store_dir, old, dataset, verify)
    patients = {case.case_id: case.patient_id for case in old.cases}
    if seed != old.split_seed or _split(patients, fractions, seed, ()) != old.split:
        differences.append(f"--split and --seed ask for another split than {_split_sizes(old)}, seed {old.split_seed}")
    if differences:
        rule = f"store {store_dir} is finished and must keep its content"
        raise InputError(
            *(f"{rule}, but {difference}" for difference in differences),
            "give another --store for the new content; the finished one is untouched and can be used",
        )


# --- Private helpers: what is printed ---


def _announce(dataset: Dataset) -> None:
    channels = ", ".join(dataset.channels)
    print(f"{dataset.name}: {_count(dataset.cases, 'case')}, layout {dataset.layout}, channels {channels}")
    print("Labels and regions:")
    for line in describe_labels(dataset):
        print(f"  {line}")
    if dataset.problems:
        incomplete = {problem.case_id for problem in dataset.problems}
        print(f"{_count(incomplete, 'more case')} with a file missing or double: told at the end")


def _summarise(manifest: Manifest, store_dir: Path) -> None:
    size_bytes = sum(case.image_bytes + case.label_bytes for case in manifest.cases)
    dtypes = Counter(case.image_dtype for case in manifest.cases)
    images = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items())
    error = max(case.max_abs_error for case in manifest.cases)
    shapes = sorted({case.shape for case in manifest.cases})
    box = tuple(max(case.box.size[axis] for case in manifest.cases) for axis in range(3))
    print(f"Store {store_dir}: {_count(manifest.cases, 'case')}, {size_bytes / 1e6:.0f} MB")
    print(f"  images   {images}; {f'rounded by up to {error:.1g} std' if error else 'exact'}")
    print(f"  shapes   {', '.join(map(_by, shapes[:4]))}{', ...' if len(shapes) > 4 else ''}")
    print(f"  brains   fit a box of {_by(box)}")
    print(f"  split    {_split_sizes(manifest)}, seed {manifest.split_seed}, hash {manifest.split_hash}")
    _tell_quarantine(store_dir)


def _tell_quarantine(store_dir: Path) -> None:
    bad = quarantined(store_dir)
    if bad:
        path = store_dir / "quarantine.jsonl"
        print(f"  left out {_count(bad, 'bad case')}, see {path}; once mended they need a new store")


def _split_sizes(manifest: Manifest) -> str:
    return ", ".join(f"{len(manifest.split[name])} {name}" for name in SPLITS)


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _count(items: Sized, what: str) -> str:
    return f"{len(items)} {what}{'' if len(items) == 1 else 's'}"
