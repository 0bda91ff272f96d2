"""Runs of a comparison: each training and each evaluation in a process of its own, timed, and read back afterwards.

    carry_out(runs, store, out, Evaluation())
    result = read_run("whole", 0, run.folder, "test", store=store)

A fresh process makes the peaks of memory honest and starts every run on equal terms. The same call continues where one
was cut off: what is trained is not trained again, what is half trained goes on, what has current scores keeps them, and
what diverged is reported as such.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from rich.console import Console

from cpu3d.config import RunConfig, load_config
from cpu3d.data.region import grid_size
from cpu3d.data.store import Store
from cpu3d.distributed.plan import of_nobody
from cpu3d.errors import DivergedError, InputError
from cpu3d.inference.evaluate import METRICS, UNTOUCHED, read_scores, scores_path
from cpu3d.inference.options import Inference
from cpu3d.inference.scores import TOLERANCE_MM
from cpu3d.recipes import RECIPES
from cpu3d.report.page import flat
from cpu3d.training.checkpoint_history import checkpoints
from cpu3d.training.run_log import read_events
from cpu3d.training_options import AUGMENT_FIELDS, UNET_FIELDS, add_training_options, chosen_settings, with_settings
from cpu3d.util.atomic import PARTIAL, writable_folder, write_json
from cpu3d.util.child import PROGRAM, ROOT, how_ended, last_step, last_words, start, told_of_signals
from cpu3d.util.progress import bar
from memory_estimator.files import read_json

MEAN = "mean"
"""In the place of a region's name: the mean over the regions."""

TIMED_STEPS = 20
"""Of a short run that measures a step: its first half compiles and warms up, its second half counts."""

TIMED_FOLDER = f".warm-up{PARTIAL}"
"""Of the short runs, in the comparison's folder, until the number of steps is kept."""

POLL_S = 1.0

OF_STORE = ("store", "store_channels", "label_names", "region_codes", "split_hash", "unet.channels", "unet.outputs")
IGNORED = ("unet.seed", "save_minutes", "read_mode", "epochs", "validations", "validate_every")
"""Settings that no option of a planned run decides, or that do not change what is learnt."""

DECIDED_BY_HOST = (
    *("channels", "regions", "grid", "patches_per_case"),
    *("device", "micro_batch", "unet.dtype", "unet.policy"),
)
"""Settings that store and host decide where no option does."""


@dataclass(frozen=True)
class Evaluation:
    """How runs are scored."""

    split: str = UNTOUCHED
    tolerance_mm: float = TOLERANCE_MM

    def __post_init__(self):
        if not (math.isfinite(self.tolerance_mm) and self.tolerance_mm >= 0):
            raise InputError(f"--tolerance must be a number of mm from 0 on, got {self.tolerance_mm}; 1 is usual")


@dataclass(frozen=True)
class PlannedRun:
    """A run to train and perhaps to score."""

    variant: str
    seed: int
    folder: Path
    options: Tuple[str, ...]
    """Of `train`, all but --store and --run; --steps and --seed are among them."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.variant}, seed {self.seed}"

    @property
    def steps(self) -> int:
        """That it is to take."""
        return int(self.options[self.options.index("--steps") + 1])

    @property
    def diverged_file(self) -> Path:
        """What a run that diverged has said, so that nobody trains it again to find out."""
        return self.folder / "diverged.json"


@dataclass(frozen=True)
class Failed:
    """A run without a result."""

    variant: str
    seed: int
    why: str
    """In a few words, without paths."""

    def __str__(self) -> str:
        return f"{self.variant}, seed {self.seed}, is left out: {self.why}."


class RunFailedError(InputError):
    """A process that did not end well."""

    def __init__(self, problem: str, exit_code: int, why: str = "failed"):
        super().__init__(problem)
        self.exit_code = exit_code
        self.why = why
        """In a few words, without paths."""
        self.run: Optional[PlannedRun] = None
        """The run that failed, where it was one."""


class RunDivergedError(RunFailedError):
    """A training, or its evaluation, whose numbers are not finite. The same run would end so again."""


def carry_out(
    runs: Sequence[PlannedRun],
    store: Path,
    out: Path,
    evaluation: Optional[Evaluation] = None,
    *,
    force: bool = False,
    keep_going: bool = False,
) -> List[Failed]:
    """Train and, with an `evaluation`, score all of `runs`, in their order.

    What the processes say is added to out/logs/NAME-train.txt and NAME-evaluate.txt, NAME being a run's folder's. The
    first failure ends it with RunFailedError, which has the last lines; RunDivergedError says that the run diverged,
    now or when it was tried before. With `keep_going` the others are still done and the failed ones are returned; only
    where all fail the first one's error is raised. A signal is passed on as SIGINT, the process saves, and
    KeyboardInterrupt is raised. A folder that holds a run of other options raises InputError.
    """
    errors: List[RunFailedError] = []
    for number, run in enumerate(runs, 1):
        try:
            _carry_out(run, f"{number}/{len(runs)} {run.name}", store, out, evaluation, force)
        except RunFailedError as error:
            error.run = run
            if not keep_going:
                raise
            _say(f"error: {error}")
            errors.append(error)
    if errors and len(errors) == len(runs):
        raise errors[0]
    return [Failed(error.run.variant, error.run.seed, error.why) for error in errors if error.run]


def evaluate_folder(folder: Path, scored: Path, store: Path, out: Path, evaluation: Evaluation, label: str) -> None:
    """Score the trained run in `folder`, in a process of its own; evaluation/ is written below `scored`."""
    command = ["evaluate", "--run", str(folder), "--store", str(store)]
    command += ["--split", evaluation.split, "--tolerance", repr(evaluation.tolerance_mm)]
    if scored != folder:
        command += ["--out", str(scored)]
    _call(command, _log(out, scored, "evaluate"), f"{label}: evaluate")


def is_trained(run: PlannedRun) -> bool:
    """Whether the run has taken all of its steps, or has stopped early.

    Raises InputError for one of other options, which would be continued as what it is and not as what is planned.
    """
    check_options(run)
    end = end_of(read_events(run.folder)) if checkpoints(run.folder) else None
    if end is None:
        return False
    return end["reason"] == "early stop" or (end["reason"] == "finished" and end["step"] == run.steps)


def check_options(run: PlannedRun) -> None:
    """Raise InputError, a problem for each setting, where the run in its folder is not what its options would train.

    A folder without a run is as it should be.
    """
    if not (run.folder / "config.json").is_file():
        return
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_training_options(parser)
    args = parser.parse_args(list(run.options))
    settings = chosen_settings(args)
    config = with_settings(RECIPES[args.recipe or "brats-regions"](), settings)
    if "patch" in settings:
        config = dataclasses.replace(config, grid=tuple(settings["patch"]))
    chosen = [_flat_name(name) for name, value in settings.items() if value != "auto"]
    found, wanted = (dict(flat(dataclasses.asdict(one))) for one in (load_config(run.folder), config))
    problems = [
        f"run {run.folder} must be of its options, got {name} {found.get(name)} for {value}; move it away, or choose "
        "another --out"
        for name, value in wanted.items()
        if not name.startswith(OF_STORE)
        and name not in IGNORED
        and (name in chosen or name not in DECIDED_BY_HOST)
        and found.get(name) != value
    ]
    if problems:
        raise InputError(*problems)


def is_evaluated(run: Path, evaluation: Evaluation, scored: Optional[Path] = None) -> bool:
    """Whether a run has scores of this kind, younger than its weights, of the network applied as it was trained.

    They are looked for in the folder `scored`, by default the run's own.
    """
    path, weights = scores_path(scored or run, evaluation.split), run / "checkpoints" / "best.npz"
    try:
        scores, is_younger = read_scores(path), path.stat().st_mtime >= weights.stat().st_mtime
    except (InputError, FileNotFoundError):
        return False  # none, or damaged: they are made again
    config = load_config(run)
    usual = {**Inference().to_json(), "window": list(config.grid) if config.is_patch else None}
    return (
        is_younger
        and scores.get("inference") == {**usual, "one_pass": not config.is_patch}
        and scores["split_hash"] == config.split_hash
        and scores["tolerance_mm"] == evaluation.tolerance_mm
        and scores["weights"] == "best"
    )


def end_of(events: Sequence[Mapping[str, Any]]) -> Optional[Mapping[str, Any]]:
    """The end of a log's last attempt; None where it was cut off, or is going on."""
    for event in reversed(events):
        if event.get("event") == "end":
            return event
        if event.get("event") in ("start", "step"):
            return None
    return None


def step_voxels(config: RunConfig) -> int:
    """Voxels that the network sees in a step."""
    return config.batch * math.prod(config.grid)


# --- Timing before a budget of minutes becomes steps ---


def step_seconds(
    options: Mapping[str, Tuple[str, ...]], store: Path, out: Path, *, force: bool = False
) -> Dict[str, float]:
    """Seconds a step by variant, the waiting for data aside: the median of two short runs' later halves.

    `options` are those of `train` by variant, of TIMED_STEPS steps. The runs go through the variants and back, A B B A,
    so that a host that slows down is the same to all. Whole ones are kept; one that was cut off is timed again, as its
    compilation is in its middle.
    """
    names = list(options)
    runs = [
        PlannedRun(name, 0, out / TIMED_FOLDER / f"{name}-timed{turn}", options[name])
        for turn, order in enumerate((names, names[::-1]))
        for name in order
    ]
    for run in runs:
        whole = False
        with contextlib.suppress(InputError):  # of other options, or damaged
            whole = is_trained(run)
        if run.folder.exists() and not whole:
            shutil.rmtree(run.folder)
    carry_out(runs, store, out, force=force)
    seconds: Dict[str, List[float]] = {name: [] for name in names}
    for run in runs:
        seconds[run.variant] += computing_seconds(read_events(run.folder))
    return {name: statistics.median(values) for name, values in seconds.items()}


def computing_seconds(events: Sequence[Mapping[str, Any]]) -> List[float]:
    """Those of each step in the later half of a log, less what it waited for data."""
    steps = [event for event in events if event.get("event") == "step"]
    return [event["step_s"] - event.get("wait_s", 0.0) for event in steps[len(steps) // 2 :]]


def forget_timing(out: Path) -> None:
    """Remove the short runs, once the steps that follow from them are kept."""
    shutil.rmtree(Path(out) / TIMED_FOLDER, ignore_errors=True)


# --- What came out of a run ---


@dataclass(frozen=True)
class Point:
    """A validation on the way."""

    voxels: int
    """Seen by the network so far."""
    seconds: float
    """Of steps so far, validation and saving aside."""
    mean_dice: float
    """Over the validation cases and regions."""


@dataclass(frozen=True)
class Costs:
    """What a run took. None is not known."""

    steps: int
    voxels: int
    """Seen by the network while training."""
    train_s: Optional[float]
    """Wall time of all attempts, validation and saving among it; None where the last one did not end."""
    steps_s: float
    """Wall time of the steps alone, with the compilation in the first and the waiting for data."""
    step_s: Optional[float]
    """Median of the steps."""
    validation_s: float
    case_train_s: Optional[float]
    """To see as many voxels as a whole case has, from `step_s`; None for patches whose store is not there."""
    train_peak_bytes: Optional[int]
    """Largest resident set of the process that trained."""
    allocator_peak_bytes: Optional[int]
    """Of TensorFlow, in the memory of the host."""
    core_hours: Optional[float]
    """`train_s` on all cores that the process had; None on a card."""
    case_predict_s: Optional[float]
    """Median over the cases that were scored; the first one compiles."""
    predict_peak_bytes: Optional[int]
    """Largest resident set of the process that predicted."""
    card_peak_bytes: Optional[int] = None
    """Of TensorFlow, in the memory of a card."""


@dataclass(frozen=True)
class RunResult:
    """A trained and scored run."""

    variant: str
    seed: int
    folder: Path
    config: RunConfig
    scores: Dict[str, Dict[str, Dict[str, float]]]
    """Region, or MEAN, -> metric -> case id -> value."""
    curve: Tuple[Point, ...]
    """The validations, in order."""
    costs: Costs
    host: Dict[str, Any]
    """Of the last attempt, from the log; empty where it does not say."""
    evaluation: Path
    """Folder of its scores.json and predictions/."""


def read_run(
    variant: str,
    seed: int,
    folder: Path,
    split: Optional[str],
    *,
    store: Optional[Store] = None,
    scored: Optional[Path] = None,
) -> RunResult:
    """Read a run that was trained and scored on `split`; with None one that was only trained, its scores empty.

    `store` says how large a whole case is to a run on patches; `scored` is the folder that holds evaluation/ where
    that is not the run's. Raises InputError where the run was not trained or scored, or its files are damaged.
    """
    folder = Path(folder)
    config, events = load_config(folder), read_events(folder)
    path = scores_path(scored or folder, split or UNTOUCHED)
    content = read_scores(path) if split else {"cases": (), "regions": ()}
    host = next((event.get("host", {}) for event in reversed(events) if event.get("event") == "start"), {})
    curve, seconds = [], 0.0
    for event in events:
        if event.get("event") == "step":
            seconds += event.get("step_s", 0.0)
        elif event.get("event") == "validation":
            curve.append(Point(event["step"] * step_voxels(config), seconds, event["mean_dice"]))
    return RunResult(
        variant=variant,
        seed=seed,
        folder=folder,
        config=config,
        scores=_by_region(content),
        curve=tuple(curve),
        costs=_costs(events, config, content, host.get("cores"), store),
        host=host,
        evaluation=path.parent,
    )


# --- Private helpers ---


def _carry_out(
    run: PlannedRun, label: str, store: Path, out: Path, evaluation: Optional[Evaluation], force: bool
) -> None:
    _raise_divergence(run)
    try:
        if is_trained(run):
            _say(f"{label}: trained already")
        else:
            command = ["train", "--store", str(store), "--run", str(run.folder), *run.options]
            command += ["--force"] if force else []
            _call(command, _log(out, run.folder, "train"), f"{label}: train", run=run.folder, steps=run.steps)
        if evaluation is not None and not is_evaluated(run.folder, evaluation):
            evaluate_folder(run.folder, run.folder, store, out, evaluation, label)
    except RunDivergedError as error:
        run.folder.mkdir(parents=True, exist_ok=True)
        write_json(run.diverged_file, {"why": error.why, "said": str(error)})
        raise


def _raise_divergence(run: PlannedRun) -> None:
    """Raise RunDivergedError for a run that has diverged before."""
    if not run.diverged_file.is_file():
        return
    check_options(run)
    try:
        content = read_json(run.diverged_file)
        before = f"{run.name} diverged before; remove {run.folder} to try again. It said:\n{content['said']}"
        error = RunDivergedError(before, DivergedError.exit_code, content["why"])
    except (ValueError, KeyError, TypeError):
        return  # damaged: the run is tried again
    raise error


def _log(out: Path, folder: Path, what: str) -> Path:
    return writable_folder(Path(out) / "logs", "folder of logs") / f"{folder.name}-{what}.txt"


def _say(line: str) -> None:
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def _call(command: Sequence[str], log: Path, label: str, *, run: Optional[Path] = None, steps: int = 1) -> None:
    """Do `python -m cpu3d command`, its words added to `log`, with a bar of the `steps` that the folder `run` logs.

    Raises RunDivergedError or RunFailedError with the last words, and KeyboardInterrupt when it ended after a signal.
    """
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ cpu3d {shlex.join(command)}\n")
        file.flush()
        begin = os.fstat(file.fileno()).st_size  # what was said before is of an earlier attempt
        with bar(label, steps) as advance, _child([*PROGRAM, *command], file) as (child, signals):
            shown = 0
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(POLL_S)
                step = min(last_step(run), steps) if run else 0
                advance(step - shown)
                shown = step
            if child.returncode == 0:
                advance(steps - shown)
    if signals:
        raise KeyboardInterrupt("the same command continues")
    if child.returncode == 0:
        return
    code, what, ended = child.returncode, command[0], how_ended(child.returncode)
    problem = f"{label} must end well, got {ended}; all of it is in {log}, which ends:\n  {last_words(log, begin)}"
    if code == DivergedError.exit_code:
        raise RunDivergedError(problem, code, f"{what} diverged")
    raise RunFailedError(problem, code if code in range(1, 7) else 1, f"{what} ended with {ended}")


@contextlib.contextmanager
def _child(command: List[str], output: Any) -> Iterator[Tuple[subprocess.Popen, List[int]]]:
    """A process, and the signals of ours that it was sent, each as SIGINT: the second one stops it unsaved."""
    children: List[subprocess.Popen] = []
    with told_of_signals(children, as_signal=lambda number: signal.SIGINT) as signals:
        child = start(command, output, of_nobody(os.environ), cwd=ROOT)
        children.append(child)
        if signals:  # while it was being started
            child.send_signal(signal.SIGINT)
        try:
            yield child, signals
        except BaseException:
            if not signals:  # a second signal would stop it unsaved
                child.terminate()
            raise
        finally:
            child.wait()


def _flat_name(setting: str) -> str:
    if setting in UNET_FIELDS:
        return f"unet.{setting}"
    if setting in AUGMENT_FIELDS:
        return f"augment.{setting}"
    return {"patch": "grid"}.get(setting, setting)


def _costs(
    events: Sequence[Mapping[str, Any]],
    config: RunConfig,
    scores: Mapping[str, Any],
    cores: Optional[int],
    store: Optional[Store],
) -> Costs:
    """What a log and the content of scores.json say of a run's cost."""

    def column(kind: str, key: str) -> List[float]:
        values = (event.get(key) for event in events if event.get("event") == kind)
        return [value for value in values if isinstance(value, (int, float))]

    def most(values: Sequence[float]) -> Optional[int]:
        return int(max(values)) if values else None

    steps_s, count = column("step", "step_s"), max(column("step", "step"), default=0)
    step_s = statistics.median(steps_s) if steps_s else None
    train_s = (end_of(events) or {}).get("seconds")
    predict_s = [case["predict_s"] for case in scores["cases"] if "predict_s" in case]
    whole_voxels = None if config.is_patch else math.prod(config.grid)
    if config.is_patch and store is not None:
        whole_voxels = math.prod(grid_size(store, extent=config.extent, multiple=config.unet.divisor))
    on_cpu, peak_bytes = config.device == "cpu", most(column("end", "allocator_peak_bytes"))
    return Costs(
        steps=int(count),
        voxels=int(count) * step_voxels(config),
        train_s=train_s,
        steps_s=math.fsum(steps_s),
        step_s=step_s,
        validation_s=math.fsum(column("validation", "seconds")),
        case_train_s=step_s / step_voxels(config) * whole_voxels if step_s and whole_voxels else None,
        train_peak_bytes=most([*column("end", "peak_rss_bytes"), *column("step", "rss_bytes")]),
        allocator_peak_bytes=peak_bytes if on_cpu else None,
        core_hours=train_s * cores / 3600 if train_s is not None and cores and on_cpu else None,
        case_predict_s=statistics.median(predict_s) if predict_s else None,
        predict_peak_bytes=scores.get("peak_rss_bytes"),
        card_peak_bytes=None if on_cpu else peak_bytes,
    )


def _by_region(scores: Mapping[str, Any]) -> Dict[str, Dict[str, Dict[str, float]]]:
    """Region, and with several MEAN, -> metric -> case id -> value."""
    regions, cases = list(scores["regions"]), scores["cases"]
    found = {
        region: {
            metric: {case["case_id"]: float(case["regions"][region][metric]) for case in cases} for metric in METRICS
        }
        for region in regions
    }
    if len(regions) > 1:
        ids = [case["case_id"] for case in cases]
        found[MEAN] = {
            metric: {one: statistics.fmean(found[region][metric][one] for region in regions) for one in ids}
            for metric in METRICS
        }
    return found
