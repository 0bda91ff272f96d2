"""The records of `bench faults` as a table: what was killed while doing what, and what it cost."""

import statistics
from typing import Any, Dict, List, Sequence

from cpu3d.bench.faults.aims import COMPUTING, ENDED, PREPARING, SAVING, STARTING, VALIDATING
from cpu3d.data.words import count
from cpu3d.util.records import newest as newest_of

PHASES = (STARTING, PREPARING, COMPUTING, VALIDATING, SAVING, ENDED)

HEADINGS = ("killed while", "kills", "steps done again, median", "most")


def newest(records: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """The last record of every number of workers and CPU."""
    return newest_of(records, lambda record: (record["workers"], record["host"]["cpu"]))


def faults_lines(record: Dict[str, Any]) -> List[str]:
    """The lines of one record."""
    return [
        summary_line(record),
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|---" * len(HEADINGS) + "|",
        *("| " + " | ".join(row) + " |" for row in rows_of(record)),
    ]


def rows_of(record: Dict[str, Any]) -> List[List[str]]:
    """The cells of each phase that was hit."""
    rows = []
    for phase in PHASES:
        hit = [kill for kill in _kills(record) if kill["hit"] == phase]
        redone = [kill["redone"] for kill in hit if "redone" in kill]
        cells = [f"{statistics.median(redone):g}", str(max(redone))] if redone else ["-", "-"]
        if hit:
            rows.append([phase, str(len(hit)), *cells])
    return rows


def summary_line(record: Dict[str, Any]) -> str:
    """What was done and what came of it, in a few sentences."""
    kills, workers, wrong = _kills(record), record["workers"], [life for life in record["lives"] if life["problems"]]
    who = "a process" if workers == 1 else f"one of {workers} workers"
    line = (
        f"SIGKILL to {who} at random moments, {_what(record)} (float32, {record['steps']} steps, seed "
        f"{record['seed']}), {record['host']['cores']} cores of {record['host']['cpu']}. "
    )
    if record["missed"]:
        line += f"{count(record['missed'], 'more kill')} came too late each time. "
    if workers > 1 and kills:
        line += f"The other workers had ended after {max(kill['ended_s'] for kill in kills):.0f} s at the most. "
    if wrong:
        return (
            f"{line}{len(wrong)} of the {len(record['lives'])} ended otherwise than what was left in peace, or lost "
            "something on the way."
        )
    return (
        f"{line}Nothing that was logged as saved was lost (steps after it are done again), and every end is that of "
        "what was left in peace, bit by bit."
    )


# --- Private helpers ---


def _what(record: Dict[str, Any]) -> str:
    """How many kills in how many folders of each kind."""
    told = []
    for command, what in (("train", "small run"), ("prepare", "small store")):
        lives = [life for life in record["lives"] if life["command"] == command]
        if lives:
            batch = sum(life["norm"] == "batch" for life in lives)
            kills = count(sum(len(life["kills"]) for life in lives), "time")
            told.append(f"{kills} in {count(len(lives), what)}{f', {batch} of them with batch norm' if batch else ''}")
    return " and ".join(told)


def _kills(record: Dict[str, Any]) -> List[Dict[str, Any]]:
    return [kill for life in record["lives"] for kill in life["kills"]]
