import gc
import os
import random

import pytest

from cpu3d.data import case_index
from cpu3d.data.case_index import CaseIndex, Selection, distinct, line_of, split_entries
from cpu3d.data.records import split_hash
from cpu3d.errors import InputError

IDS = ("a", "b", "c", "d")


@pytest.fixture
def written(tmp_path, make_record):
    """The records a to d, and their file."""
    records = [make_record(case_id, patient_id=f"patient {case_id}") for case_id in IDS]
    path = tmp_path / "cases.jsonl"
    path.write_bytes(b"".join(map(line_of, records)))
    return records, path


def opened(path, ids=IDS):
    return CaseIndex(path, ids, path.stat().st_size)


def test_records_come_back_as_they_were_written_in_any_order(written):
    records, path = written
    index = opened(path)
    places = list(range(len(records))) * 3
    random.Random(0).shuffle(places)
    assert [index[place] for place in places] == [records[place] for place in places]
    assert list(index) == records
    assert index == records
    assert index == opened(path)
    assert index != records[:3]
    assert index[-1] == records[-1]
    assert index[1:3] == tuple(records[1:3])
    assert len(index) == 4
    with pytest.raises(IndexError):
        index[4]


def test_only_what_is_asked_for_is_parsed_and_only_so_much_is_kept(written, monkeypatch):
    _, path = written
    parsed = []
    real = case_index.case_from_json
    monkeypatch.setattr(
        case_index, "case_from_json", lambda content: parsed.append(content["case_id"]) or real(content)
    )
    monkeypatch.setattr(case_index, "KEPT", 2)
    index = opened(path)
    assert parsed == []
    for place in (0, 0, 1, 0, 2, 0, 1):
        index[place]
    assert parsed == ["a", "b", "c", "b"]


def test_of_records_that_share_their_arrays_the_first_is_parsed_and_no_other(tmp_path, make_record, monkeypatch):
    quoted = 'a"stem":"b\\'
    stems = ["one", quoted, "one", "\u00fc", quoted, "\u00fc"]
    records = [make_record(str(n), stem=stem, patient_id='"stem":"x"') for n, stem in enumerate(stems)]
    path = tmp_path / "cases.jsonl"
    path.write_bytes(b"".join(map(line_of, records)))
    index = opened(path, [record.case_id for record in records])
    parsed = []
    real = case_index.case_from_json
    monkeypatch.setattr(
        case_index, "case_from_json", lambda content: parsed.append(content["case_id"]) or real(content)
    )
    assert [record.case_id for record in distinct(index)] == parsed == ["0", "1", "3"]
    assert [record.case_id for record in distinct(Selection(index, (5, 4, 3, 2)))] == ["5", "4", "2"]
    assert list(distinct(records)) == [records[0], records[1], records[3]]


def test_lines_are_found_across_the_pieces_in_which_the_file_is_read(tmp_path, make_record):
    records = [make_record(f"{number:04d}") for number in range(1500)]
    path = tmp_path / "cases.jsonl"
    path.write_bytes(b"".join(map(line_of, records)))
    assert path.stat().st_size > 1 << 20
    index = opened(path, [record.case_id for record in records])
    assert [record.case_id for record in index] == [record.case_id for record in records]


def test_a_file_of_another_length_or_number_of_lines_is_refused(written):
    _, path = written
    size_bytes = path.stat().st_size
    with pytest.raises(InputError, match="must hold 3 cases, got 4"):
        opened(path, IDS[:3])
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(InputError, match=rf"must be {size_bytes} bytes long, got {size_bytes - 1}"):
        CaseIndex(path, IDS, size_bytes)
    path.unlink()
    with pytest.raises(InputError, match=rf"must be {size_bytes} bytes long, got none"):
        CaseIndex(path, IDS, size_bytes)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b'{"case_id":"b"', b'#"case_id":"b",', "must hold case b in line 2, got JSONDecodeError"),
        (b'{"case_id":"b"', b'{"case_id":"x"', "must hold case b in line 2, got case x"),
        (b'{"case_id":"b"', b'{"case_ID":"b"', "must hold case b in line 2, got KeyError"),
        (b'patient_id":"patient b"', b'patient_ID":"patient b"', "must be complete in line 2"),
        (b'patient_id":"patient b"', b'patient_id":null', "must be complete in line 2"),
        (b'patient_id":"patient b"', b'patient_id":["patient b"]', "must be complete in line 2"),
    ],
)
def test_a_damaged_line_is_told_when_it_is_asked_for_and_the_others_are_good(written, old, new, told):
    records, path = written
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    index = opened(path)
    assert index[0] == records[0]
    assert index[2] == records[2]
    with pytest.raises(InputError, match=told):
        index[1]
    with pytest.raises(InputError, match=told):
        split_entries(index)


def test_a_record_that_cannot_be_is_told_with_its_file_and_line(written):
    _, path = written
    for old, new in (
        (b'"stem":"b"', b'"stem":"../b"'),
        (b'"shape":[4,4,4]', b'"shape":[4,4,3]'),
        (b'"centres":{', b'"centres":[],"more":{'),
        (b'"label_voxels":{', b'"label_voxels":7,"more":{'),
    ):
        lines = path.read_bytes().splitlines(keepends=True)
        assert old in lines[1]
        lines[1] = lines[1].replace(old, new, 1)
        other = path.with_name("other.jsonl")
        other.write_bytes(b"".join(lines))
        with pytest.raises(InputError, match=r"other\.jsonl must be complete in line 2, got"):
            opened(other)[1]


def test_an_index_that_nobody_needs_closes_its_file_at_once(written):
    _, path = written

    def is_open():
        return str(path) in {os.path.realpath(handle.path) for handle in os.scandir("/proc/self/fd")}

    gc.disable()
    try:
        index = opened(path)
        assert list(index)
        assert is_open()
        del index
        assert not is_open()
        with pytest.raises(InputError):
            opened(path, IDS[:1])
    finally:
        gc.enable()


def test_a_file_replaced_while_it_is_opened_is_read_as_the_one_that_was_opened(written, monkeypatch):
    records, path = written
    real = case_index._line_ends

    def replaced(file):
        ends = real(file)
        path.with_name("new").write_bytes(path.read_bytes()[::-1])
        path.with_name("new").replace(path)
        return ends

    monkeypatch.setattr(case_index, "_line_ends", replaced)
    index = opened(path)
    monkeypatch.undo()
    assert list(index) == records


def test_a_selection_is_a_sequence_of_its_own_that_makes_no_record_by_itself(written, monkeypatch):
    records, path = written
    index = opened(path)
    monkeypatch.setattr(CaseIndex, "__getitem__", lambda self, place: pytest.fail("made a record"))
    chosen = Selection(index, [3, 0, 2])
    tail = chosen[1:]
    assert (len(chosen), len(tail)) == (3, 2)
    monkeypatch.undo()
    assert [record.case_id for record in chosen] == ["d", "a", "c"]
    assert chosen == [records[3], records[0], records[2]]
    assert tail == [records[0], records[2]]
    assert chosen != tail
    with pytest.raises(IndexError):
        chosen[3]


def test_the_splits_facts_are_the_same_from_the_file_as_from_the_records(written):
    records, path = written
    entries = split_entries(opened(path))
    assert entries == split_entries(records)
    assert entries[0].patient_id == "patient a"
    split = {"train": IDS[:2], "val": IDS[2:], "test": ()}
    assert split_hash(split, entries) == split_hash(split, records)
