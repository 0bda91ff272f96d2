"""What a fault campaign holds its folders against: a store and runs that nothing is ever done to."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Sequence

from cpu3d.bench.faults.aims import (
    ANYWHERE,
    COMPUTING,
    NORMS,
    PREPARING,
    SAVING,
    SAVING_BY_TIME,
    STARTING,
    VALIDATING,
    Life,
)
from cpu3d.bench.faults.processes import CommandFailedError, Ended, attempt
from cpu3d.bench.faults.watch import LogTail, Usual
from cpu3d.data.phantom import write_phantom
from cpu3d.training.run_log import read_events
from cpu3d.util.child import how_ended, last_words

CASES, SHAPE = 16, (32, 40, 32)

STEPS, KEEP = 240, 3

RUN = (
    *("--steps", STEPS, "--validations", 12, "--batch", 2, "--save-minutes", 0.004, "--keep", KEEP, "--ema", 0.9),
    *("--filters", 4, "--depth", 3, "--dtype", "float32", "--policy", "speed", "--deterministic"),
)
"""Steps of milliseconds, enough of them to be killed in between, with saves by time and by validation."""


@dataclass(frozen=True)
class Bench:
    """What all lives share."""

    folder: Path
    workers: int
    usual: Usual

    @property
    def log(self) -> Path:
        """What all the processes said."""
        return self.folder / "said.txt"

    def command(self, life: Life, folder: Path) -> List[str]:
        """What a life does, into `folder`."""
        if life.command == "prepare":
            return ["prepare", "--dataset", str(self.folder / "phantom"), "--store", str(folder), "--workers", "2"]
        launch = ["launch", "--workers", str(self.workers)] if self.workers > 1 else []
        data = ["--store", str(self.store), "--run", str(folder)]
        return [*launch, "train", *data, "--norm", life.norm, *map(str, RUN)]

    @property
    def store(self) -> Path:
        """The one prepared in peace."""
        return self.folder / "store"

    def reference(self, norm: str) -> Path:
        """The run trained in peace."""
        return self.folder / f"reference-{norm}"


def undisturbed(workdir: Path, workers: int, norms: Sequence[str]) -> Bench:
    """The phantoms, the store and the runs that all is compared with, and how long the phases of the first took."""
    write_phantom(workdir / "phantom", cases=CASES, shape=SHAPE, seed=0)
    seconds: Dict[str, float] = {}
    bench = Bench(workdir, workers, Usual(seconds, STEPS, frozenset()))
    store, reference = bench.store, bench.reference(NORMS[0])
    seen: Dict[str, float] = {}

    def first_seen(name, is_there):
        def wait(begin, alive):
            while alive():
                if name not in seen and is_there():
                    seen[name] = time.monotonic() - begin
                time.sleep(0.001)
            return False

        return wait

    ended = _whole(bench, Life("prepare", ()), store, first_seen(PREPARING, (store / "cases").is_dir))
    seconds[PREPARING] = ended.at_s - seen.get(PREPARING, 0.0)
    tail = LogTail(reference)

    def has_started():
        tail.look()
        return tail.started

    ended = _whole(bench, Life("train", (), NORMS[0]), reference, first_seen(STARTING, has_started))
    for norm in sorted({*norms} - {NORMS[0]}):
        _whole(bench, Life("train", (), norm), bench.reference(norm), first_seen(norm, lambda: False))
    events = read_events(reference)
    seconds[STARTING], seconds[ANYWHERE] = seen.get(STARTING, ended.at_s), ended.at_s
    for phase, event, name in (
        (COMPUTING, "step", "step_s"),
        (VALIDATING, "validation", "seconds"),
        (SAVING, "checkpoint", "seconds"),
    ):
        seconds[phase] = min(found[name] for found in events if found["event"] == event)
    seconds[SAVING_BY_TIME] = seconds[SAVING]
    validations = frozenset(found["step"] for found in events if found["event"] == "validation")
    return Bench(workdir, workers, Usual(seconds, STEPS, validations))


# --- Private helpers ---


def _whole(bench: Bench, life: Life, folder: Path, wait: Any) -> Ended:
    ended = attempt(bench.command(life, folder), bench.log, wait=wait)
    if ended.exit_code != 0:
        raise CommandFailedError(
            f"{life.command} without any kill must end well, got {how_ended(ended.exit_code)}; "
            f"{bench.log} ends:\n  {last_words(bench.log)}"
        )
    return ended
