"""The harness: processes and their answers, ways in turn, those that die, medians and ratios, peers."""

import functools
import os
import sys

import pytest

from cpu3d.bench.harness import ProcessFailedError, in_turn, peer_of, run_command, run_peer, summary, with_range
from cpu3d.errors import InputError


def python(code):
    return [sys.executable, "-c", code]


def scripted(**answers):
    """Ways that answer as listed, an exception by raising it; and the list of (name, round) as they were called."""
    called = []

    def measure(name, number):
        called.append((name, number))
        if isinstance(answers[name][number], Exception):
            raise answers[name][number]
        return answers[name][number]

    return {name: functools.partial(measure, name) for name in answers}, called


def died(returncode=-9):
    return ProcessFailedError("dead", returncode, "no words")


def test_ways_take_turns_and_one_that_dies_is_not_tried_again():
    ways, called = scripted(a=[{"n": 1}, {"n": 2}, {"n": 3}], b=[{"n": 4}, died(), {"n": 5}])
    found, failures = in_turn(ways, 3, "test")
    assert called == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]
    assert found == {"a": [{"n": 1}, {"n": 2}, {"n": 3}], "b": [{"n": 4}, None, None]}
    assert failures["b"].reason == "killed, as the kernel does when memory runs out"


def test_without_a_result_there_is_none():
    answers = {"a": [{"n": 1}]}
    for own, keep_going in (({"a": [died()]}, True), ({"b": [died(0)]}, True), ({"b": [died()]}, False)):
        with pytest.raises(ProcessFailedError):
            in_turn(scripted(**{**answers, **own})[0], 1, "test", keep_going=keep_going)


def test_ratios_are_taken_within_a_round_and_peaks_are_the_highest():
    baseline = [{"step_s": 2}, {"step_s": 4}, None, {"step_s": 3}]
    results = [{"step_s": 3, "process_peak_bytes": 5}, {"step_s": 4, "process_peak_bytes": 9}, {"step_s": 8}, None]
    row = summary(results, baseline)
    assert (row["step_s"], row["step_s_min"], row["step_s_max"]) == (4, 3, 8)
    assert (row["ratio"], row["ratio_min"], row["ratio_max"]) == (1.25, 1, 1.5)  # of the rounds that both have
    assert (row["process_peak_bytes"], row["allocator_peak_bytes"]) == (9, None)
    assert with_range(row, "ratio") == "1.25 (1.00 to 1.50)"
    assert with_range(summary([{"step_s": 2}], [None]), "step_s") == "2.00"
    assert with_range(summary([None], [None]), "ratio") == "-"


def test_the_last_line_of_json_is_the_answer_and_one_that_fails_is_named():
    code = "import sys; print('words'); print('{\"n\": 1}'); print('more words', file=sys.stderr)"
    assert run_command(python(code), "it") == {"n": 1}
    with pytest.raises(ProcessFailedError, match="it must end with a line of JSON") as caught:
        run_command(python("raise SystemExit('no torch')"), "it")
    assert caught.value.reason == "exited with 1 saying: no torch"


def test_a_peer_tells_its_step_its_name_and_its_peak():
    result = run_peer(f'{sys.executable} -c "print(\'{{\\"step_s\\": 2, \\"peak_rss_bytes\\": 7}}\')"')
    assert (result["step_s"], result["process_peak_bytes"]) == (2, 7)
    assert result["peer"] == os.path.basename(sys.executable)
    about = peer_of("python /x/peer.py --fast", [None, {"peer": "torch"}])
    assert about == {"peer": "torch", "options": "python --fast"}
    with pytest.raises(InputError, match="must print JSON with step_s"):
        run_peer(f"{sys.executable} -c 'print({{}})'")
    with pytest.raises(InputError, match="must be a command"):
        run_peer("python 'x")
