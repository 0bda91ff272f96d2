"""A process's memory over time, as a trace that mprof reads and as a picture."""

import warnings

import pytest

from cpu3d.bench.process_memory import draw_process, write_trace
from cpu3d.host.memory import Resident

MIB = 2**20
SEEN = [Resident(100.0 + t, (50 + 10 * t) * MIB, 20 * MIB) for t in range(6)]
MOMENTS = [("data", 100.5, 101.5), ("step", 102.0, 104.0), ("step", 104.0, 105.0)]


def test_mprof_reads_the_trace_as_its_own(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mprof = pytest.importorskip("mprof")
    path = tmp_path / "t.mprof"
    write_trace(path, SEEN, MOMENTS, "python -m cpu3d bench memory")
    read = mprof.read_mprofile_file(str(path))
    assert read["mem_usage"] == [70, 80, 90, 100, 110, 120]
    assert read["timestamp"] == [100, 101, 102, 103, 104, 105]
    assert read["cmd_line"].strip() == "python -m cpu3d bench memory"
    # begin, end, MiB at the begin, MiB at the end, depth of the call
    assert read["func_timestamp"]["step"] == [[102, 104, 90, 110, 0], [104, 105, 110, 120, 0]]
    assert read["func_timestamp"]["data"] == [[100.5, 101.5, 70, 80, 0]]


@pytest.mark.parametrize(("seen", "moments"), [(SEEN, MOMENTS), ([], []), (SEEN[:1], [])])
def test_a_picture_is_drawn_of_whatever_was_seen(seen, moments):
    assert draw_process(seen, moments, title="t", predicted_bytes=90 * MIB).startswith(b"\x89PNG")
