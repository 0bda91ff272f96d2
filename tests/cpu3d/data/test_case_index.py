import json
import random

import pytest

from cpu3d.data import store as case_index
from cpu3d.data.records import to_json
from cpu3d.data.store import CaseIndex, distinct, heads
from cpu3d.errors import InputError

IDS = ("a", "b", "c", "d")


def write(path, records):
    path.write_bytes(
        b"".join(json.dumps(to_json(record), separators=(",", ":")).encode() + b"\n" for record in records)
    )
    return path


def opened(path, ids=IDS, size_bytes=None):
    return CaseIndex(path, ids, path.stat().st_size if size_bytes is None else size_bytes)


@pytest.fixture
def written(tmp_path, make_record):
    """The records a to d, and their file."""
    records = [make_record(case_id, patient_id=f"patient {case_id}") for case_id in IDS]
    return records, write(tmp_path / "cases.jsonl", records)


def test_records_come_back_as_they_were_written_in_any_order(written):
    records, path = written
    index = opened(path)
    places = list(range(len(records))) * 3
    random.Random(0).shuffle(places)
    assert [index[place] for place in places] == [records[place] for place in places]
    assert index == records == opened(path)
    assert index != records[:3]
    assert (index[-1], index[1:3], len(index)) == (records[-1], tuple(records[1:3]), 4)
    with pytest.raises(IndexError):
        index[4]


def test_of_records_that_share_their_arrays_the_first_is_parsed_and_no_other(tmp_path, make_record, monkeypatch):
    quoted = 'a"stem":"b\\'
    stems = ["one", quoted, "one", "\u00fc", quoted, "\u00fc"]
    records = [make_record(str(n), stem=stem, patient_id='"stem":"x"') for n, stem in enumerate(stems)]
    index = opened(write(tmp_path / "cases.jsonl", records), [record.case_id for record in records])
    parsed, real = [], case_index.case_from_json
    monkeypatch.setattr(case_index, "case_from_json", lambda line: parsed.append(json.loads(line)) or real(line))
    assert [record.case_id for record in distinct(index)] == [line["case_id"] for line in parsed] == ["0", "1", "3"]
    assert [record.case_id for record in distinct(index.select((5, 4, 3, 2)))] == ["5", "4", "2"]
    assert list(distinct(records)) == [records[0], records[1], records[3]]


def test_a_file_of_another_length_or_number_of_lines_is_refused(written):
    _, path = written
    size_bytes = path.stat().st_size
    with pytest.raises(InputError, match="must hold 3 cases, got 4"):
        opened(path, IDS[:3])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=rf"must be {size_bytes} bytes long, got {size_bytes - 1}"):
        opened(path, size_bytes=size_bytes)
    path.unlink()
    with pytest.raises(InputError, match=rf"must be {size_bytes} bytes long, got none"):
        opened(path, size_bytes=size_bytes)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (b'{"case_id":"b"', b'#"case_id":"b",', "JSON is malformed"),
        (b'{"case_id":"b"', b'{"case_id":"x"', "case x"),
        (b'{"case_id":"b"', b'{"case_ID":"b"', "Object missing"),
        (b'patient_id":"patient b"', b'patient_ID":"patient b"', ""),
        (b'patient_id":"patient b"', b'patient_id":["patient b"]', ""),
    ],
)
def test_a_damaged_line_is_named_when_it_is_asked_for_and_the_others_are_good(written, old, new, found):
    records, path = written
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    index = opened(path)
    assert (index[0], index[2]) == (records[0], records[2])
    for read in (lambda: index[1], lambda: list(heads(index))):
        with pytest.raises(InputError, match=f"must hold case b in line 2, got {found}"):
            read()
