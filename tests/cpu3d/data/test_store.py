import json

import pytest

from cpu3d.data.store import open_store, sealed
from cpu3d.errors import InputError
from tests.cpu3d.conftest import make_store


def test_a_check_names_every_damaged_file_at_once(tiny_store):
    assert not tiny_store.label("a").flags.writeable
    records = tiny_store.cases("train")
    tiny_store.check(records)
    cases = tiny_store.folder / "cases"
    (cases / "a.x.npy").unlink()
    (cases / "a.y.npy").unlink()
    (cases / "a.y.npy").mkdir()
    (cases / "b.x.npy").write_bytes(b"0" * records[1].files["x"].size_bytes)
    with pytest.raises(InputError) as caught:
        tiny_store.check(records)
    for name, problem in zip(("a.x.npy", "a.y.npy", "b.x.npy"), caught.value.problems):
        assert name in problem


def test_a_case_without_a_label_has_none(tmp_path):
    store = make_store(tmp_path / "store", tmp_path / "source", labelled=False)
    with pytest.raises(InputError, match="case b must have a label"):
        store.label("b")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda content: content.update(schema=1), "of schema 3, got schema 1"),
        (lambda content: content.pop("labels"), "complete"),
        (lambda content: content["split"]["val"].append("a"), "got a split of other cases"),
        (lambda content: content["cases"].update(a="0"), r"a\.json must .*, got other bytes"),
        (lambda content: content["cases"].update({"../c": "0"}), "complete JSON"),
        (lambda content: content.update(split_hash="0"), "must have hash 0, got"),
    ],
)
def test_a_manifest_that_is_damaged_or_of_another_version_is_refused(tiny_store, change, rule):
    path = tiny_store.folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(sealed(content)))
    with pytest.raises(InputError, match=rule):
        open_store(tiny_store.folder)


def test_a_manifest_that_is_edited_is_refused(tiny_store):
    path = tiny_store.folder / "manifest.json"
    regions = {"ET": [3], "WT": [1, 2, 3], "TC": [2, 3]}  # in another order
    path.write_text(json.dumps({**json.loads(path.read_text()), "regions": regions}))
    with pytest.raises(InputError, match=r"must be complete JSON .*, got an edited manifest"):
        open_store(tiny_store.folder)


@pytest.mark.parametrize(
    ("name", "todo"),
    [
        ("source.json", "run `prepare`, again"),
        ("dataset.json", "make a store by `prepare --dataset"),
        ("config.json", "it is a run"),
    ],
)
def test_a_folder_without_a_manifest_is_refused_with_what_it_is(tmp_path, name, todo):
    (tmp_path / name).touch()
    for folder, rule in ((tmp_path, todo), (tmp_path / name, "there is no such folder")):
        with pytest.raises(InputError, match=f"hold a finished manifest.json, .* none; .*{rule}"):
            open_store(folder)
