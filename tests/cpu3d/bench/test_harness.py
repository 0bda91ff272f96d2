"""The harness: processes and their answers."""

import sys

import pytest

from cpu3d.bench.harness import ProcessFailedError, run_command, run_peer
from cpu3d.errors import InputError


def test_the_last_line_of_json_is_the_answer_and_a_command_that_fails_is_named():
    code = "import sys; print('words'); print('{\"n\": 1}'); print('more words', file=sys.stderr)"
    assert run_command([sys.executable, "-c", code], "it") == {"n": 1}
    for code, words in (("raise SystemExit('no torch')", "exit code 1: no torch"), ("print(3)", "exit code 0: 3")):
        with pytest.raises(ProcessFailedError, match=f"it must end with a line of JSON, got {words}"):
            run_command([sys.executable, "-c", code], "it")


def test_a_peer_gives_its_step_and_its_peak():
    result = run_peer(f'{sys.executable} -c "print(\'{{\\"step_s\\": 2, \\"peak_rss_bytes\\": 7}}\')"')
    assert (result["step_s"], result["process_peak_bytes"]) == (2, 7)
    with pytest.raises(InputError, match="must print JSON with step_s"):
        run_peer(f"{sys.executable} -c 'print({{}})'")
    with pytest.raises(InputError, match="No closing quotation"):
        run_peer("python 'x")
