"""Time the real training step in a fresh process, alone or in turn with a peer.

    ./run.sh bench step --shape 240 240 160 --channels 4 --filters 16 --batch 1 --dtype bfloat16 --json

The step is the trainer's own: network, loss, gradients, optimizer. A peer is any command whose last line of output is
JSON with "step_s"; it runs in turn with ours, and the ratio is taken round by round.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from rich.console import Console
from rich.table import Table

from cpu3d.bench.measure import WARM_UP_STEPS
from cpu3d.bench.record import append_record
from cpu3d.config import RunConfig
from cpu3d.errors import InputError
from cpu3d.host.apply import ENGINES
from memory_estimator.host import read_host
from memory_estimator.job import OPTIMIZERS
from memory_estimator.options import add_network_options, network_from
from models.config import DTYPES, POLICIES
from models.layer_plan import layer_plan

ROOT = Path(__file__).resolve().parents[2]

LOOK_EVERY_S = 0.02
"""Between two looks at a measuring process; a look takes 0.1 ms of another core."""

KILLED = (-9, 128 + 9)
"""What a process exits with that the kernel's out-of-memory killer ends, alone and under a shell."""


class ProcessFailedError(InputError):
    """A measuring process ended without a result: what it was asked to do cannot be done here.

    `returncode` is what it exited with, negative for a signal; `told` is the last line that it said.
    """

    def __init__(self, problem: str, returncode: int = 1, told: str = ""):
        super().__init__(problem)
        self.returncode, self.told = returncode, told

    @property
    def reason(self) -> str:
        """In a few words, for a table."""
        if self.returncode in KILLED:
            return "killed, as the kernel does when memory runs out"
        return f"exited with {self.returncode} saying: {self.told}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_step_options(parser)
    add_engine_options(parser)
    parser.add_argument(
        "--peer", action="append", default=[], metavar="COMMAND", help="run in turn with ours; repeatable"
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="how often, in turn (default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append the result to a .jsonl file")


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """What is measured: shared by all kinds of bench."""
    parser.add_argument("--shape", type=int, nargs=3, default=(128, 128, 128), metavar=("X", "Y", "Z"))
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="volumes a step (default: 1)")
    parser.add_argument(
        "--micro-batch", type=int, default=0, metavar="M", help="volumes at a time (default: as `train` does)"
    )
    add_network_options(parser)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--policy", choices=POLICIES, default="speed", help="memory policy (default: speed)")
    add_count_options(parser)


def add_count_options(parser: argparse.ArgumentParser) -> None:
    """How many steps are done."""
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps timed (default: 5)")
    parser.add_argument(
        "--warm-up", type=int, default=WARM_UP_STEPS, metavar="N", help="steps before those, not timed (default: 2)"
    )


def counts_from(args: argparse.Namespace) -> Dict[str, int]:
    """The part of a request that `add_count_options` asks for. Raises InputError for a number out of range."""
    for name, least in (("steps", 1), ("warm_up", 0)):
        if getattr(args, name) < least:
            raise InputError(f"{name} must be at least {least}, got {getattr(args, name)}; give a larger number")
    return {"steps": args.steps, "warm_up": args.warm_up}


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What one measurement runs on; `bench engines` tries them all."""
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="default: bfloat16 where it is fast")
    parser.add_argument("--engine", choices=ENGINES, default="auto", help="default: auto, ITEX where it is installed")


def run(args: argparse.Namespace) -> int:
    if args.rounds < 1:
        raise InputError(f"rounds must be at least 1, got {args.rounds}; give a positive number")
    check_peers(args.peer)
    request = step_request(args, dtype=args.dtype, engine=args.engine)
    ours: List[Dict[str, Any]] = []
    peers: List[List[Dict[str, Any]]] = [[] for _ in args.peer]
    for _ in range(args.rounds):
        ours.append(measure_in_fresh_process(request))
        for results, command in zip(peers, args.peer):
            results.append(run_peer(command))
    result = _middle(ours)
    result["rounds"] = [one["step_s"] for one in ours]
    result["peers"] = [_against(command, results, ours) for command, results in zip(args.peer, peers)]
    if args.json:
        print(json.dumps(result))
    else:
        Console().print(_table(result))
    if args.record:
        append_record(args.record, "step", result)
    return 0


def step_request(args: argparse.Namespace, *, dtype: str, engine: str) -> Dict[str, Any]:
    """What `bench.measure` is to do. Raises InputError for a network or a shape that cannot be."""
    if dtype == "auto":
        dtype = read_host().best_dtype
    if args.batch < 1:
        raise InputError(f"batch must be at least 1, got {args.batch}; give a positive number")
    try:
        unet = network_from(args, dtype)
        layer_plan(unet, tuple(args.shape))
    except ValueError as error:
        raise InputError(str(error)) from None
    config = RunConfig(unet=unet, batch=args.batch, micro_batch=args.micro_batch)
    return {
        "shape": list(args.shape),
        "batch": args.batch,
        "micro_batch": config.micro,
        "unet": dataclasses.asdict(unet),
        "optimizer": args.optimizer,
        **counts_from(args),
        "engine": engine,
        "matmul": ["before", "after"],
    }


def measure_in_fresh_process(
    request: Dict[str, Any], look: Optional[Callable[[int], None]] = None, threads: Optional[int] = None
) -> Dict[str, Any]:
    """Run `bench.measure` on `request` in a new process: nothing allocated or compiled before counts.

    `look` is called with the process's id every 20 ms as long as it runs; `threads` are the host's own number or what
    the environment says where None is given.
    """
    command = [sys.executable, "-m", "cpu3d.bench.measure", json.dumps(request)]
    more = {} if threads is None else dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"), str(threads))
    return last_json_line(command, "the measured step", look=look, environment={**os.environ, **more})


def last_json_line(
    command: List[str],
    who: str,
    cwd: Optional[Path] = ROOT,
    look: Optional[Callable[[int], None]] = None,
    environment: Optional[Dict[str, str]] = None,
) -> Dict[str, Any]:
    """Run a command and read the last line it prints.

    Raises ProcessFailedError, with what it said, where that is no JSON. SIGINT and SIGTERM kill the command and raise
    KeyboardInterrupt, in the background as well.
    """
    with _stopped_by_signals():
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            out, err = _watched(process, look)
        except BaseException:  # Ctrl-C among them: nothing is left running
            process.kill()
            process.communicate()
            raise
    lines = out.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        told = (err.strip().splitlines() or ["nothing"])[-1]
        # A negative code is a signal: -9 is what the kernel's out-of-memory killer sends.
        raise ProcessFailedError(
            f"{who} must end with a line of JSON, exited with {process.returncode} saying: {told}",
            process.returncode,
            told,
        ) from None


def check_peers(commands: Sequence[str]) -> None:
    """Raise InputError, naming all of them, unless every command can be read and its program is there."""
    problems = []
    for command in commands:
        try:
            program = shlex.split(command)[:1]
        except ValueError as error:
            problems.append(f"peer must be a command, got {command!r}: {error}; mend it")
            continue
        if not program or not shutil.which(program[0]):
            problems.append(f"peer must begin with a program that is there, got {command!r}; mend it")
    if problems:
        raise InputError(*problems)


def run_peer(command: str) -> Dict[str, Any]:
    """What a peer says of its step. Raises InputError where its JSON has no step_s, ProcessFailedError without JSON."""
    result = last_json_line(shlex.split(command), f"peer {command!r}", cwd=None)
    if not isinstance(result, dict) or not isinstance(result.get("step_s"), (int, float)):
        found = sorted(result) if isinstance(result, dict) else result
        raise InputError(f"peer must print JSON with step_s, got {found} from {command!r}; adapt it")
    return result


# --- Private helpers ---


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM too, and for SIGINT where a shell has it ignored, as in the background.

    Python alone would end at a SIGTERM without a word to the process that measures, which then runs on.
    """
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread alone
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watched(process: Any, look: Optional[Callable[[int], None]]) -> Tuple[str, str]:
    """What the process printed, once it has ended."""
    while look:
        look(process.pid)
        try:
            return process.communicate(timeout=LOOK_EVERY_S)
        except subprocess.TimeoutExpired:
            continue
    return process.communicate()


def _middle(results: List[Dict[str, Any]]) -> Dict[str, Any]:
    """The result with the (lower) median step time, whole: its figures belong together."""
    return dict(sorted(results, key=lambda one: one["step_s"])[(len(results) - 1) // 2])


def _against(command: str, results: List[Dict[str, Any]], ours: List[Dict[str, Any]]) -> Dict[str, Any]:
    ratios = [theirs["step_s"] / mine["step_s"] for theirs, mine in zip(results, ours)]
    return {
        "peer": results[0].get("peer", shlex.split(command)[0]),
        "options": " ".join(part for part in shlex.split(command) if "/" not in part),
        "step_s": statistics.median(theirs["step_s"] for theirs in results),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "process_peak_bytes": results[0].get("peak_rss_bytes"),
    }


def _table(result: Dict[str, Any]) -> Table:
    unet = result["unet"]
    shape = " x ".join(map(str, result["shape"]))
    title = f"Training step, {shape} x {unet['channels']}, {unet['filters']} filters, batch {result['batch']}"
    table = Table(title=title, show_header=False, title_justify="left")
    gib = lambda n: "not counted by this engine" if n is None else f"{n / 2**30:.2f} GiB"  # noqa: E731
    for name, value in (
        ("engine", result["engine_name"]),
        ("dtype", unet["dtype"]),
        ("step", f"{result['step_s']:.2f} s ({result['step_s_min']:.2f} to {result['step_s_max']:.2f})"),
        ("rate", f"{result['gflops']:.0f} GFLOP/s, {result['matmul_peak_share']:.0%} of this host's matrix product"),
        ("allocator peak", gib(result["allocator_peak_bytes"])),
        ("process peak", gib(result["process_peak_bytes"])),
    ):
        table.add_row(name, value)
    for peer in result["peers"]:
        spread = f"({peer['ratio_min']:.2f} to {peer['ratio_max']:.2f})"
        table.add_row(
            f"{peer['peer']}", f"{peer['step_s']:.2f} s, {peer['ratio']:.2f} times ours {spread}: {peer['options']}"
        )
    return table
