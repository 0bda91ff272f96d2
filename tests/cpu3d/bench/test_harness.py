"""The harness: ways in turn, those that die, medians and ratios, peers."""

import sys

import pytest

from cpu3d.bench.harness import ProcessFailedError, check_peers, in_turn, last_json_line, run_peer, summary, with_range
from cpu3d.errors import InputError


def python(code):
    return f'{sys.executable} -c "{code}"'


def scripted(**answers):
    """Ways that answer as listed, an exception by raising it; and the list of (name, round) as they were called."""
    called = []

    def way(name):
        def measure(number):
            called.append((name, number))
            answer = answers[name][number]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return measure

    return {name: way(name) for name in answers}, called


def died(returncode=-9):
    return ProcessFailedError("dead", returncode, "no words")


def test_ways_take_turns_and_one_that_dies_is_not_tried_again():
    ways, called = scripted(a=[{"n": 1}, {"n": 2}, {"n": 3}], b=[{"n": 4}, died(), {"n": 5}])
    found, failures = in_turn(ways, 3, "test")
    assert called == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]
    assert found == {"a": [{"n": 1}, {"n": 2}, {"n": 3}], "b": [{"n": 4}, None, None]}
    assert failures["b"].reason == "killed, as the kernel does when memory runs out"


@pytest.mark.parametrize(
    ("answers", "more"),
    [
        ({"a": [died()], "b": [died()]}, {}),
        ({"a": [{"n": 1}], "b": [died(0)]}, {}),  # it did not die, it has no result
        ({"a": [{"n": 1}], "b": [died()]}, {"keep_going": False}),
    ],
)
def test_without_a_result_there_is_none(answers, more):
    with pytest.raises(ProcessFailedError):
        in_turn(scripted(**answers)[0], 1, "test", **more)


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


def test_what_a_process_ends_with_is_read_and_what_it_dies_of_is_named():
    assert last_json_line([sys.executable, "-c", "print('words'); print('[1]')"], "it") == [1]
    with pytest.raises(ProcessFailedError, match="it must end with a line of JSON") as caught:
        last_json_line([sys.executable, "-c", "raise SystemExit('no torch')"], "it")
    assert caught.value.reason == "exited with 1 saying: no torch"


@pytest.mark.parametrize("code", ["print(3)", "print('null')", "print({})", "print('{\\\"step_s\\\": null}')"])
def test_a_peer_that_gives_no_seconds_is_refused(code):
    with pytest.raises(InputError, match="peer must print JSON with step_s"):
        run_peer(python(code))


def test_a_peer_tells_its_step_and_its_peak():
    result = run_peer(python('print(\'{\\"step_s\\": 2, \\"peak_rss_bytes\\": 7}\')'))
    assert (result["step_s"], result["process_peak_bytes"]) == (2, 7)


def test_all_peers_that_cannot_run_are_named():
    with pytest.raises(InputError) as caught:
        check_peers(["no-such-program --x", "echo 'x", "", "echo x"])
    assert len(caught.value.problems) == 3
