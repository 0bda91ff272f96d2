import errno
import hashlib
import json
import pickle
import re
import tracemalloc

import pytest

from cpu3d.data import store as store_module
from cpu3d.data.cases.case import load_case
from cpu3d.data.datasets.dataset import CaseFiles
from cpu3d.data.manifest import record_path, remake, to_json
from cpu3d.data.store import open_store, sealed, write_store
from cpu3d.data.stores.convert import write_arrays
from cpu3d.errors import InputError
from cpu3d.util.atomic import write_json
from tests.cpu3d.data.made_datasets import (
    make_record,
    manifest_of,
    tiny_image,
    tiny_label,
    write_nifti,
)

ALONE = {"train": ["a"], "val": [], "test": []}


@pytest.fixture
def small_store(tmp_path):
    """A store of two cases, "b" without a label: its folder and manifest."""
    folder = tmp_path / "store"
    records = []
    (folder / "cases").mkdir(parents=True)
    for case_id in ("a", "b"):
        image = write_nifti(tmp_path / f"{case_id}.nii.gz", tiny_image(ord(case_id)))
        label = None
        if case_id == "a":
            label = write_nifti(tmp_path / "seg.nii.gz", tiny_label(1))
        files = CaseFiles(case_id, case_id, (image,), label)
        case = load_case(files, channels=("CT",), labels={0: "no", 1: "yes"})
        arrays = (case.image, case.label)
        records.append(write_arrays(folder, case.record, *arrays, format_="npy", cropped=True))
    manifest = manifest_of(records, {"train": ("a",), "val": ("b",)})
    write_store(folder, manifest)
    return folder, manifest


def test_a_check_names_every_damaged_file_at_once_and_reads_no_voxel(small_store):
    folder, manifest = small_store
    assert not open_store(folder).label("a").flags.writeable
    with pytest.raises(InputError, match="case b must have a label"):
        open_store(folder).label("b")
    open_store(folder).check(manifest.cases)
    (folder / "cases/a.x.npy").unlink()
    (folder / "cases/a.y.npy").write_bytes(b"")
    (folder / "cases/b.x.npy").write_bytes(b"0" * manifest.cases[1].image_bytes)
    with pytest.raises(InputError) as caught:
        open_store(folder).check(manifest.cases)
    for name, problem in zip(("a.x.npy", "a.y.npy", "b.x.npy"), caught.value.problems):
        assert name in problem


def change_manifest(folder, change):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(sealed(change(content) or content)))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda content: content.update(schema=2), "of schema 1, got schema 2"),
        (lambda content: {"schema": 1}, "complete JSON of schema 1, got no 'records'"),
        (lambda content: content.update(split=["a", "b"]), "complete"),
        (lambda content: content.pop("labels") and None, "complete"),
        (lambda content: content.update(name="\x1b[2J"), r"control characters, got '\\x1b\[2J'"),
        (lambda content: content["regions"].update({"\x1b": [1]}), r"control .*, got '\\x1b'"),
        (
            lambda content: content.update(largest_box=[1, "x", 1]),
            r"manifest.largest_box\[1\] must be int, got x",
        ),
        (
            lambda content: content["split"]["val"].append("a"),
            "the 3 cases of the split, got b in place of a",
        ),
        (
            lambda content: content.update(split_hash="0"),
            "split of store .* must have hash 0, got ",
        ),
        (
            lambda content: content["records"].update(sha256="0"),
            "must be as it was written, got other bytes",
        ),
        (lambda content: content["records"].update(file="cases-0.jsonl"), "must exist, got none"),
    ],
)
def test_a_manifest_that_is_damaged_or_of_another_version_is_refused(small_store, change, rule):
    folder, _ = small_store
    change_manifest(folder, change)
    with pytest.raises(InputError, match=rule):
        open_store(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"largest_box": [1, 1, 1]},
        {"regions": {"none": [0], "all": [1]}},  # in another order
        {"sha256": ""},
        {"split_seed": float("nan")},
    ],
)
def test_a_manifest_that_is_edited_is_refused(small_store, change):
    folder, manifest = small_store
    write_store(folder, remake(manifest, regions={"all": (1,), "none": (0,)}))
    open_store(folder)
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(InputError, match=r"must be complete JSON .*, got an edited manifest"):
        open_store(folder)


@pytest.mark.parametrize("content", ['{"schema": 1', "7", "{}"])
def test_a_manifest_that_is_cut_is_refused(small_store, content):
    folder, _ = small_store
    (folder / "manifest.json").write_text(content)
    with pytest.raises(InputError, match="complete JSON"):
        open_store(folder)


def test_a_folder_without_a_manifest_is_refused(small_store):
    folder, _ = small_store
    (folder / "manifest.json").unlink()
    with pytest.raises(InputError, match="found none"):
        open_store(folder)


def test_a_data_set_in_place_of_a_store_is_named_with_the_command_that_makes_a_store(tmp_path):
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.raises(InputError, match=f"prepare --dataset {re.escape(str(tmp_path))}"):
        open_store(tmp_path)


def test_a_store_that_is_replaced_while_it_is_opened_opens_as_the_new_one(small_store, monkeypatch):
    folder, manifest = small_store
    newer = [remake(manifest, name="newer", cases=manifest.cases[:1], split=ALONE)]
    real = store_module.open_regular

    def slow(path):
        if newer:
            write_store(folder, newer.pop())
        return real(path)

    monkeypatch.setattr(store_module, "open_regular", slow)
    opened = open_store(folder).manifest
    assert (opened.name, opened.cases) == ("newer", manifest.cases[:1])


def test_a_large_store_takes_little_memory_for_each_case(tmp_path):
    cases = 2000
    centres = tuple((x, y, z) for x in range(4) for y in range(4) for z in range(2))
    records = (make_record(f"case {n:06d}", centres={1: centres, 2: centres}) for n in range(cases))
    ids = [f"case {n:06d}" for n in range(cases)]
    write_store(tmp_path, manifest_of(list(records), {"train": ids[:1800], "val": ids[1800:]}))
    tracemalloc.start()
    try:
        store = open_store(tmp_path)
        seen = [record.case_id for split in ("train", "val") for record in store.cases(split)]
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seen == ids
    assert store.case(ids[7]).centres[2] == centres
    assert kept < 1500 * cases, "the records themselves take 8 KB each"
    assert peak < 2500 * cases


def test_a_store_that_is_open_keeps_its_records_when_their_file_is_replaced_or_stale(
    small_store, monkeypatch
):
    folder, manifest = small_store
    opened = open_store(folder)
    write_store(folder, remake(manifest, cases=manifest.cases[:1], split=ALONE))
    assert opened.manifest.cases == manifest.cases
    first, second = manifest.cases
    for record in (first, second):
        write_json(record_path(folder, record.case_id), to_json(record))

    def stale(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr("os.pread", stale)  # as on a network, when another host has replaced it
        assert opened.case("b") == second
        write_json(record_path(folder, "b"), to_json(first))
        with pytest.raises(InputError, match=r"b\.json must have the record"):
            opened.case("b")


def test_a_record_that_is_changed_in_place_is_named(small_store):
    folder, _ = small_store
    opened = open_store(folder)
    (path,) = folder.glob("cases-*.jsonl")
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content.replace(b'patient_id":"b"', b'patient_id":"x"'))
    assert opened.case("a").patient_id == "a"
    with pytest.raises(InputError, match=rf"{path.name} must stay as it was .* case b"):
        opened.case("b")


def test_cases_are_a_sequence_in_the_order_that_was_asked_for(small_store):
    folder, manifest = small_store
    cases = open_store(folder).manifest.cases
    assert cases == list(manifest.cases) == [cases[0], cases[-1]]
    assert cases[::-1][0] == cases[1:][0] == cases[1]
    assert cases[:1] != cases
    assert pickle.loads(pickle.dumps(cases)) == cases
    assert len(cases[5:]) == 0
    with pytest.raises(IndexError):
        cases[2]


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        (
            b'{"case_id":"b"',
            b'#"case_id":"b",',
            ":2 must be the record of a case, got JSON is malformed",
        ),
        (b'{"case_id":"b"', b'{"case_id":"x"', "must hold the 2 cases of the split"),
        (
            b'patient_id":"b"',
            b'patient_id":["b"]',
            ":2 must be the record of a case, got Expected `str`",
        ),
    ],
)
def test_a_bad_record_is_named_though_the_hash_was_made_to_fit(small_store, old, new, rule):
    folder, _ = small_store
    (path,) = folder.glob("cases-*.jsonl")
    path.write_bytes(path.read_bytes().replace(old, new))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    change_manifest(folder, lambda content: content["records"].update(sha256=digest))
    with pytest.raises(InputError, match=rule):
        open_store(folder)
