"""Records of measurements: appended, and read by kind."""

from pathlib import Path

import pytest

from cpu3d.errors import NoRoomError
from cpu3d.util.records import append_record, listed, plus_minus
from records.files import read_records


def test_records_are_appended_and_read_by_their_kind(tmp_path):
    path = tmp_path / "new" / "r.jsonl"
    for kind in ("step", "engines"):
        append_record(path, kind, {"step_s": 1})
    (record,) = read_records(path, "step")
    assert (record["schema"], record["kind"], record["step_s"]) == (1, "step", 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named_with_what_to_do():
    with pytest.raises(NoRoomError, match=r"^/dev/full must fit on its disk, .*; free space there"):
        append_record(Path("/dev/full"), "step", {"step_s": 1})


def test_lists_and_deviations_are_written_for_a_reader():
    assert [listed(items) for items in ([1], "ab", ["a", "b", 3])] == ["1", "a and b", "a, b and 3"]
    assert plus_minus(0.9124, 0.0041, 3) == "0.912 \u00b1 0.004"
    assert plus_minus(0.9124, None, 2) == "0.91"
