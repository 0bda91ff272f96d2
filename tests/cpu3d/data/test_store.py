import json
import threading

import numpy as np
import pytest

from cpu3d.data import store as store_module
from cpu3d.data.case import load_case
from cpu3d.data.layouts import CaseFiles
from cpu3d.data.records import array_path, remake
from cpu3d.data.store import check_names, open_store, sealed, write_store
from cpu3d.data.write_cases import write_arrays
from cpu3d.errors import InputError

ALONE = {"train": ["a"], "val": [], "test": []}
FORMATS = [("npy", False), ("npy", True), ("b2nd", False), ("b2nd", True)]


@pytest.fixture
def write_small(tmp_path, write_nifti, tiny_image, tiny_label, manifest_of):
    """write_small(format_, cropped): a store of two cases, "b" without a label; its folder and manifest."""

    def write(format_="npy", cropped=False):
        folder = tmp_path / f"store-{format_}-{cropped}"
        (folder / "cases").mkdir(parents=True)
        records = []
        for case_id in ("a", "b"):
            images = (write_nifti(tmp_path / f"{case_id}.nii.gz", tiny_image(ord(case_id))),)
            label = write_nifti(tmp_path / "seg.nii.gz", tiny_label(1)) if case_id == "a" else None
            case = load_case(CaseFiles(case_id, case_id, images, label), channels=("CT",), labels={0: "no", 1: "yes"})
            records.append(write_arrays(folder, case.record, case.image, case.label, format_=format_, cropped=cropped))
        manifest = manifest_of(records, {"train": ("a",), "val": ("b",)})
        write_store(folder, manifest)
        return folder, manifest

    return write


@pytest.fixture
def small_store(write_small):
    return write_small()


@pytest.mark.parametrize(("format_", "cropped"), FORMATS)
def test_every_format_gives_the_same_whole_grids_read_only(write_small, tiny_image, tiny_label, format_, cropped):
    folder, manifest = write_small(format_, cropped)
    store = open_store(folder)
    assert store.manifest == manifest
    image, label = store.image("a"), store.label("a")
    assert np.array_equal(image[..., 0], tiny_image(ord("a")))
    assert np.array_equal(label, tiny_label(1))
    assert (image.dtype, label.dtype) == (np.int16, np.uint8)
    assert not image.flags.writeable
    assert not label.flags.writeable
    assert store.case("a").stored.size == ((4, 3, 2) if cropped else (6, 5, 4))


def test_every_format_has_the_same_split_hash(write_small):
    assert len({write_small(format_, cropped)[1].split_hash for format_, cropped in FORMATS}) == 1


def test_an_open_store_maps_what_is_ready_for_zero_copy(small_store):
    folder, _ = small_store
    store = open_store(folder)
    assert [case.case_id for case in store.cases("train")] == ["a"]
    assert store.image("a").ctypes.data % 64 == 0
    mapped = (folder / "cases/a.x.npy").resolve()
    image = store.image("a")
    with open("/proc/self/maps", encoding="utf-8") as maps:
        assert str(mapped) in maps.read()
    assert image.flags.c_contiguous


def test_a_case_without_a_label_is_told(small_store):
    store = open_store(small_store[0])
    assert not store.case("b").has_label
    assert store.manifest.unlabelled == ("b",)
    with pytest.raises(InputError, match="case b must have a label"):
        store.label("b")
    with pytest.raises(KeyError):
        store.case("c")


@pytest.mark.parametrize("format_", ["npy", "b2nd"])
@pytest.mark.parametrize("change", [-1, 1])
def test_an_array_of_another_length_is_never_mapped(write_small, format_, change):
    folder, manifest = write_small(format_)
    path = array_path(folder, manifest.cases[0], "x")
    content = path.read_bytes()
    path.write_bytes(content[:-1] if change < 0 else content + b"\0")
    with pytest.raises(InputError, match=rf"a\.x\.{format_} must be \d+ bytes long"):
        open_store(folder).image("a")
    path.unlink()
    with pytest.raises(InputError, match="must exist"):
        open_store(folder).image("a")


def test_a_check_names_every_damaged_file_at_once_and_reads_no_voxel(small_store):
    folder, manifest = small_store
    open_store(folder).check(manifest.cases)
    (folder / "cases/a.x.npy").unlink()
    (folder / "cases/a.y.npy").write_bytes(b"")
    (folder / "cases/b.x.npy").write_bytes(b"0" * manifest.cases[1].image_bytes)
    with pytest.raises(InputError) as caught:
        open_store(folder).check(manifest.cases)
    assert [name in str(caught.value) for name in ("a.x.npy", "a.y.npy", "b.x.npy")] == [True] * 3
    assert len(caught.value.problems) == 3


def change_manifest(folder, change):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(sealed(change(content) or content)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda content: content.update(schema=1), "must have schema 2, got 1; run `prepare` again"),
        (lambda content: content.update(schema=99), "schema 2, got 99"),
        (lambda content: {"schema": 2}, "complete, got KeyError"),
        (lambda content: content.update(split=["a", "b"]), "complete"),
        (lambda content: content.pop("labels") and None, "complete"),
        (lambda content: content.update(records=None), "complete"),
        (lambda content: content.update(unlabelled=3), "manifest.unlabelled must be"),
        (lambda content: content.update(largest_box=[1, "x", 1]), r"manifest.largest_box\[1\] must be int, got x"),
        (lambda content: content["split"]["val"].append("a"), "case a of store .* must be in one split, got two"),
        (lambda content: content["split"]["val"].append("c"), "must hold 3 cases, got 2"),
        (lambda content: content["records"].update(bytes=7), "must be 7 bytes long"),
        (lambda content: content["records"].update(file="cases-0.jsonl"), "got none"),
    ],
)
def test_a_manifest_that_is_damaged_or_of_another_version_is_refused(small_store, change, told):
    folder, _ = small_store
    change_manifest(folder, change)
    with pytest.raises(InputError, match=told):
        open_store(folder)


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content.update(largest_box=[1, 1, 1]),
        lambda content: content.update(name="another"),
        lambda content: content.update(channels=["MR"]),
        lambda content: content.update(regions=dict(reversed(content["regions"].items()))),
        lambda content: content["records"].update(bytes=7),
        lambda content: content.pop("versions"),
        lambda content: content.pop("sha256"),
        lambda content: content.update(split_seed=float("nan")),
    ],
)
def test_a_manifest_that_was_edited_is_refused(small_store, edit):
    folder, manifest = small_store
    write_store(folder, remake(manifest, regions={"all": (1,), "none": (0,)}))
    open_store(folder)
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"manifest\.json must be as it was written, got an edited one; restore it or"):
        open_store(folder)


def test_a_manifest_in_another_layout_is_the_same(small_store):
    folder, manifest = small_store
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert open_store(folder).manifest == manifest


def test_a_store_that_is_replaced_while_it_is_opened_opens_as_the_new_one(small_store, monkeypatch):
    folder, manifest = small_store
    newer = [remake(manifest, name=f"name {number}", cases=manifest.cases[:1], split=ALONE) for number in range(2)]
    newer[1] = remake(manifest, name="name 1")
    real = store_module.CaseIndex

    def slow(*arguments):
        if newer:
            write_store(folder, newer.pop(0))
        return real(*arguments)

    monkeypatch.setattr(store_module, "CaseIndex", slow)
    opened = open_store(folder)
    assert opened.manifest.name == "name 1"
    assert list(opened.manifest.cases) == list(manifest.cases)


def test_a_store_whose_records_are_gone_for_good_is_told_after_one_more_look(small_store, monkeypatch):
    folder, _ = small_store
    (records,) = folder.glob("cases-*.jsonl")
    records.unlink()
    looks = []
    real = store_module.read_manifest
    monkeypatch.setattr(store_module, "read_manifest", lambda folder: looks.append(1) or real(folder))
    with pytest.raises(InputError, match="got none"):
        open_store(folder)
    assert len(looks) == 2


def test_a_record_never_leads_out_of_its_store(small_store, tmp_path):
    folder, _ = small_store
    (folder / "cases/a.x.npy").rename(tmp_path / "outside.x.npy")
    (records,) = folder.glob("cases-*.jsonl")
    content = records.read_bytes().replace(b'"stem":"a"', b'"stem":"../../outside"')
    records.write_bytes(content)
    change_manifest(folder, lambda manifest: manifest["records"].update(bytes=len(content)))
    with pytest.raises(
        InputError, match=r"cases-\w+.jsonl must be complete in line 1, got .*stem must be a name without"
    ):
        open_store(folder).image("a")


def test_a_store_without_a_whole_manifest_is_refused(small_store):
    folder, _ = small_store
    for content in ('{"schema": 2', '["no object"]', "7", "{}"):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(InputError, match="JSON with a schema"):
            open_store(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(InputError, match="found none"):
        open_store(folder)


def test_records_outside_the_store_are_never_opened(small_store, tmp_path):
    folder, _ = small_store
    (records,) = folder.glob("cases-*.jsonl")
    elsewhere = tmp_path / "cases-elsewhere.jsonl"
    records.replace(elsewhere)
    for name in (str(elsewhere), "../cases-0.jsonl", "x/../cases-0.jsonl", "cases-0.jsonl\0", "manifest.json", ""):
        change_manifest(folder, lambda content, name=name: content["records"].update(file=name))
        with pytest.raises(InputError, match=r"records file of store .* must be named cases-\*.jsonl"):
            open_store(folder)


def test_a_split_that_was_changed_by_hand_is_refused_by_the_check(small_store):
    folder, _ = small_store
    open_store(folder).check_split()
    change_manifest(folder, lambda content: content["split"].update(train=["b"], val=["a"]))
    with pytest.raises(InputError, match=r"split of store .* must have hash"):
        open_store(folder).check_split()


def test_a_patient_in_two_splits_is_refused_by_the_check(small_store):
    folder, _ = small_store
    (records,) = folder.glob("cases-*.jsonl")
    records.write_bytes(records.read_bytes().replace(b'"patient_id":"b"', b'"patient_id":"a"'))
    with pytest.raises(InputError, match="patient a must be in one split, got train and val"):
        open_store(folder).check_split()


def test_a_new_manifest_takes_the_old_ones_place_and_open_stores_go_on(small_store):
    folder, manifest = small_store
    before = open_store(folder)
    changed = remake(manifest, name="renamed")
    write_store(folder, changed)
    assert open_store(folder).manifest == changed
    smaller = remake(manifest, cases=manifest.cases[:1], split={"train": ["a"], "val": [], "test": []})
    write_store(folder, smaller)
    assert len(list(folder.glob("*cases*.*"))) == 1
    assert len(open_store(folder).manifest.cases) == 1
    assert before.case("b") == manifest.cases[1]
    assert list(before.manifest.cases) == list(manifest.cases)


def test_a_write_that_fails_leaves_the_store_as_it_was(small_store, monkeypatch):
    folder, manifest = small_store
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    def full(path, content):
        raise OSError(28, "no space left", str(path))

    monkeypatch.setattr("cpu3d.data.store.write_json", full)
    smaller = remake(manifest, cases=manifest.cases[:1], split={"train": ["a"], "val": [], "test": []})
    with pytest.raises(OSError, match="no space"):
        write_store(folder, smaller)
    assert open_store(folder).manifest == manifest
    assert all((folder / name).read_bytes() == content for name, content in before.items())


def test_threads_may_share_a_store(small_store, tiny_image):
    store, wrong = open_store(small_store[0]), []

    def read():
        for _ in range(50):
            if not np.array_equal(store.image("a")[..., 0], tiny_image(ord("a"))) or store.case("b").case_id != "b":
                wrong.append(1)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_names_must_be_some_of_those_there_each_once():
    check_names("channels", ("b", "a"), ("a", "b", "c"))
    for wanted in ((), ("a", "a"), ("d",)):
        with pytest.raises(InputError, match="channels must be among a, b, c, each once"):
            check_names("channels", wanted, ("a", "b", "c"))
