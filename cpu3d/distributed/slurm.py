"""What Slurm tells a task that `srun` has started: which task of which hosts it is. Pure: nothing is asked.

By hand, as TensorFlow's SlurmClusterResolver needs TensorFlow imported and asks for NVIDIA cards. The variables are
those of srun(1), section OUTPUT ENVIRONMENT VARIABLES.
"""

import itertools
import math
import re
from dataclasses import dataclass
from typing import List, Mapping, Tuple

from cpu3d.errors import InputError

FIRST_PORT, PORTS_A_JOB, JOBS = 15000, 16, 1000
"""Below Linux's own range for connections, which begins at 32768; so jobs of one host seldom share a port."""

MOST_HOSTS = 100_000
"""In a list: one with more is a slip of the keyboard."""


@dataclass(frozen=True)
class SlurmTask:
    """A task of a job step."""

    hosts: Tuple[str, ...]
    """Of the step, in Slurm's order."""
    tasks: Tuple[int, ...]
    """Of the step on each host. Tasks are numbered host by host, Slurm's --distribution=block."""
    rank: int
    """This task's among all of them."""
    ports: Tuple[int, ...]
    """For the tasks of one host, or its workers. May be fewer than needed: then the port after the last is next."""

    @property
    def host_index(self) -> int:
        """Which of the hosts this task is on."""
        return next(index for index, end in enumerate(itertools.accumulate(self.tasks)) if self.rank < end)

    @property
    def is_worker(self) -> bool:
        """Whether each task is one worker, as some host has several; else each is its host's and starts workers."""
        return max(self.tasks) > 1


def in_slurm(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task of `srun`. A batch script by itself is none: it is once on the first host."""
    return "SLURM_PROCID" in environ and ("SLURM_STEP_NODELIST" in environ or "SLURM_STEP_ID" in environ)


def bound_apart(environ: Mapping[str, str]) -> bool:
    """Whether Slurm keeps the tasks of this host to CPUs of their own. Then none shares its CPUs with another."""
    return len(set(filter(None, environ.get("SLURM_CPU_BIND_LIST", "").split(",")))) > 1


def read_slurm(environ: Mapping[str, str]) -> SlurmTask:
    """The task that this process is. Raises InputError, naming the variables, where they do not agree."""
    hosts = expand_hosts(_first(environ, "", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    of_each = _first(environ, f"1(x{len(hosts)})", "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    job = _first(environ, "0", "SLURM_JOB_ID", "SLURM_JOBID")
    for name, text in (("SLURM_PROCID", environ.get("SLURM_PROCID", "")), ("SLURM_JOB_ID", job)):
        if not re.fullmatch(r"[0-9]+", text):
            raise InputError(f"{name} must be a whole number, got {text!r}; start by srun")
    tasks, rank = expand_counts(of_each), int(environ["SLURM_PROCID"])
    count = _first(environ, str(sum(tasks)), "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if len(tasks) != len(hosts) or str(sum(tasks)) != count or rank >= sum(tasks):
        got = f"SLURM_PROCID {rank} and {of_each} of {count} tasks on {len(hosts)} hosts; start by srun"
        raise InputError(f"Slurm's step must have tasks on each of its hosts, got {got}, or name --hosts")
    reserved = environ.get("SLURM_STEP_RESV_PORTS", "")  # of `srun --resv-ports`
    first = FIRST_PORT + int(job) % JOBS * PORTS_A_JOB
    ports = map(int, _numbers(reserved, reserved)) if reserved else range(first, first + PORTS_A_JOB)
    task = SlurmTask(hosts, tasks, rank, tuple(ports))
    own = {"SLURM_NODEID": task.host_index, "SLURM_LOCALID": rank - sum(tasks[: task.host_index])}
    wrong = [f"{name} {environ[name]}" for name, mine in own.items() if environ.get(name, str(mine)) != str(mine)]
    if wrong:
        got = f"{', '.join(wrong)} for task {rank}; start by srun --distribution=block"
        raise InputError(f"Slurm's tasks must be numbered host by host, got {got}")
    return task


def expand_hosts(text: str) -> Tuple[str, ...]:
    """The names of Slurm's short form: "node[01-03,7],login" is node01, node02, node03, node7, login.

    Several brackets in one name are all combined, the last varying fastest. Raises InputError for anything else.
    """
    hosts: List[str] = []
    for name in re.split(r",(?![^\[]*\])", text.strip()):
        if not re.fullmatch(r"(?:[^\[\],\s]|\[[\d,-]+\])+", name):
            raise _bad_hosts(text)
        parts = re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", name)
        choices = [_numbers(ranges, text) if ranges else [words] for words, ranges in parts]
        if math.prod(map(len, choices)) > MOST_HOSTS:
            raise _bad_hosts(text)
        hosts += map("".join, itertools.product(*choices))
    return tuple(hosts)


def expand_counts(text: str) -> Tuple[int, ...]:
    """Slurm's short form of one number a host: "2(x3),1" is 2, 2, 2, 1."""
    found = [re.fullmatch(r"(\d+)(?:\(x(\d{1,5})\))?", part.strip()) for part in text.split(",")]
    if not all(found):
        raise InputError(f"SLURM_STEP_TASKS_PER_NODE must be like 2(x3),1, got {text!r}; start by srun")
    return tuple(int(one[1]) for one in found for _ in range(int(one[2] or 1)))


# --- Private helpers ---


def _numbers(ranges: str, text: str) -> List[str]:
    """ "01-03,7" with leading zeros as they are written."""
    numbers: List[str] = []
    for part in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not found or not 0 <= int(found[2] or found[1]) - int(found[1]) < MOST_HOSTS:
            raise _bad_hosts(text)
        numbers += [str(n).zfill(len(found[1])) for n in range(int(found[1]), int(found[2] or found[1]) + 1)]
    return numbers


def _first(environ: Mapping[str, str], otherwise: str, *names: str) -> str:
    """The first of these variables that is set and not empty."""
    return next(filter(None, map(environ.get, names)), otherwise)


def _bad_hosts(text: str) -> InputError:
    return InputError(f"host list must be like node[01-03,7],login, got {text!r}; start by srun, or name --hosts")
