import hashlib
import json

import pytest

from cpu3d.data.store import sealed
from cpu3d.data.stores.prepare import Settings, prepare
from cpu3d.data.stores.verify import verify
from cpu3d.util.atomic import write_json


@pytest.fixture
def store_in(tmp_path, decathlon):
    """store_in(**settings): a store of three cases, one a split, made with them."""

    def make(**settings):
        how = {"fractions": (1, 1, 1), "workers": 1, "settings": Settings(**settings)}
        prepare(decathlon(tmp_path / "data"), tmp_path / "store", **how)
        return tmp_path / "store"

    return make


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("format_", "part"), [("npy", "x"), ("b2nd", "y")])
def test_damaged_files_are_all_told_with_what_to_do(store_in, format_, part):
    store = store_in(format=format_)
    files = [store / f"cases/BRATS_00{number}.{part}.{format_}" for number in range(3)]
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    flip(files[2])
    problems, rules = verify(store, workers=1), ("must exist", "bytes long, got", "got other content; restore it")
    assert len(problems) == 3
    for path, problem, rule in zip(files, problems, rules):
        assert str(path) in problem
        assert rule in problem


def edit_records(store, edit):
    """Change the lines of a store's records as one would who knows of their file's length and hash, and the seal."""
    manifest = json.loads((store / "manifest.json").read_text())
    path = store / manifest["records"]["file"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(content)
    manifest["records"].update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    write_json(store / "manifest.json", sealed(manifest))
    for own in store.glob("cases/*.json"):
        own.unlink()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("box", {"start": [2, 2, 2], "size": [4, 3, 2]}),
        ("channel_mean", [1.0, 2.0, 3.0, 4.0]),
        ("label_voxels", {"0": 117, "1": 1, "2": 2}),
        ("centres", {"1": [[1, 2, 1]], "2": [[2, 2, 1]], "3": [[3, 2, 2]]}),
    ],
)
def test_a_record_that_does_not_follow_from_its_voxels_is_told(store_in, name, value):
    store = store_in()
    edit_records(store, lambda lines: lines[1].update({name: value}))
    (problem,) = verify(store, workers=1)
    assert f"{name} in the record of case BRATS_001 must follow from its voxels" in problem


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("largest_box", [1] * 3, "largest_box in the manifest"),
        ("unlabelled", ["nobody"], "unlabelled in the manifest"),
        ("split_hash", "0" * 12, "must have hash 000000000000, got "),
        ("regions", {"WT": [9]}, "region WT of store "),
    ],
)  # fmt: skip
def test_a_manifest_that_does_not_follow_from_its_records_is_refused_though_sealed(store_in, name, value, problem):
    store = store_in()
    content = json.loads((store / "manifest.json").read_text())
    write_json(store / "manifest.json", sealed({**content, name: value}))
    (found,) = verify(store, workers=1)
    assert problem in found


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"label_voxels": {"0": 117, "9": 3}}, "must have the store's channels and codes"),
        ({"patient_id": "BRATS_000"}, "patient BRATS_000 must be in one split"),
    ],
)
def test_a_record_that_contradicts_the_store_is_refused(store_in, changes, problem):
    store = store_in()
    edit_records(store, lambda lines: lines[1].update(changes))
    assert problem in "\n".join(verify(store, workers=1))
