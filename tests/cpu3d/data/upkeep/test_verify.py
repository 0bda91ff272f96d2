import hashlib
import json
import shutil

import numpy as np
import pytest

from cpu3d.data.files.arrays import encode, voxels_sha256
from cpu3d.data.prepare import prepare
from cpu3d.data.store import open_store, sealed
from cpu3d.data.upkeep import verify as verify_module
from cpu3d.data.upkeep.info import store_info
from cpu3d.data.upkeep.repeat import repeat_entries
from cpu3d.data.upkeep.verify import verify
from cpu3d.data.write_cases import Settings
from cpu3d.errors import InputError
from cpu3d.util.atomic import write_json
from cpu3d.util.child import KILLED


@pytest.fixture
def store_in(tmp_path, decathlon):
    """store_in(**settings): a store of three cases, one a split, made with them."""

    def make(**settings):
        prepare(
            decathlon(tmp_path / "data"),
            tmp_path / "store",
            fractions=(1, 1, 1),
            workers=1,
            settings=Settings(**settings),
        )
        return tmp_path / "store"

    return make


def change(path, change):
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def flip(path, place=-1):
    change(path, lambda content: content.__setitem__(place, content[place] ^ 1))


@pytest.mark.parametrize("settings", [{}, {"crop": True}, {"scores": True}, {"format": "b2nd", "crop": True}])
def test_a_good_store_of_every_format_has_no_problems(store_in, settings):
    store = store_in(**settings)
    found = verify(store, workers=1)
    assert (found.problems, found.strays, found.cases, found.arrays) == ((), (), 3, 3)
    assert found.bytes_read == sum(path.stat().st_size for path in store.glob("cases/*.[xy].*"))


def test_two_processes_find_what_one_does(store_in):
    store = store_in()
    flip(store / "cases/BRATS_001.x.npy")
    (store / "cases/BRATS_002.y.npy").unlink()
    one, two = verify(store, workers=1), verify(store, workers=2)
    assert sorted(one.problems) == sorted(two.problems)
    assert len(one.problems) == 2


@pytest.mark.parametrize("format_", ["npy", "b2nd"])
@pytest.mark.parametrize("part", "xy")
def test_damaged_files_are_all_told_with_what_to_do(store_in, format_, part):
    store = store_in(format=format_)
    files = [store / f"cases/BRATS_00{number}.{part}.{format_}" for number in range(3)]
    files[0].unlink()
    change(files[1], lambda content: content.pop())
    flip(files[2])
    problems = verify(store, workers=1).problems
    assert len(problems) == 3
    for path, problem, told in zip(files, problems, ("must exist", "bytes long, got", "got other content; restore it")):
        assert str(path) in problem
        assert told in problem
        assert "prepare" in problem


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
        ("channel_std", [1.0, 2.0, 3.0, 4.0]),
        ("channel_max", [7.0, 7.0, 7.0, 7.0]),
        ("channel_voxels", [24, 24, 24, 23]),
        ("label_voxels", {"0": 117, "1": 1, "2": 2}),
        ("centres", {"1": [[1, 2, 1]], "2": [[2, 2, 1]], "3": [[3, 2, 2]]}),
    ],
)
def test_a_record_that_does_not_follow_from_its_voxels_is_told(store_in, name, value):
    store = store_in()
    edit_records(store, lambda lines: lines[1].update({name: value}))
    (problem,) = verify(store, workers=1).problems
    assert f"{name} in the record of case BRATS_001 must follow from its voxels" in problem


def test_a_mean_that_differs_in_its_last_digits_is_the_same(store_in):
    store = store_in()
    edit_records(store, lambda lines: lines[1].update(channel_mean=[m * (1 + 1e-14) for m in lines[1]["channel_mean"]]))
    assert verify(store, workers=1).problems == ()


def test_voxels_that_are_not_those_of_the_case_are_told(store_in):
    store = store_in()
    fields = ("image_sha256", "image_bytes", "label_sha256", "label_bytes")
    for part in "xy":
        shutil.copy(store / f"cases/BRATS_000.{part}.npy", store / f"cases/BRATS_001.{part}.npy")
    edit_records(store, lambda lines: lines[1].update({name: lines[0][name] for name in fields}))
    (problem,) = verify(store, workers=1).problems
    assert "voxels in" in problem
    assert "BRATS_001.x.npy must be those of case BRATS_001" in problem


def test_damaged_records_are_told_line_by_line_and_the_arrays_of_the_others_are_still_read(store_in):
    store = store_in()
    (path,) = store.glob("cases-*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"#" + lines[1][1:]
    path.write_bytes(b"".join(lines))
    flip(store / "cases/BRATS_002.x.npy")
    told = "\n".join(verify(store, workers=1).problems)
    assert f"{path} must be as it was written" in told
    assert "must hold case BRATS_001 in line 2" in told
    assert "BRATS_002.x.npy must be as it was written" in told


def test_a_records_file_with_another_hash_is_told_where_every_line_reads_well(store_in):
    store = store_in()
    (path,) = store.glob("cases-*.jsonl")
    content = path.read_bytes()
    assert content.count(b'"sform_code":1') == 3
    path.write_bytes(content.replace(b'"sform_code":1', b'"sform_code":2', 1))
    told = "\n".join(verify(store, workers=1).problems)
    assert f"{path} must be as it was written" in told
    assert "cases/BRATS_000.json must say what the store says" in told


def test_a_case_that_moved_to_another_split_is_told(store_in):
    store = store_in()
    content = json.loads((store / "manifest.json").read_text())
    split = content["split"]
    split["train"], split["test"] = split["test"], split["train"]
    write_json(store / "manifest.json", sealed(content))
    (problem,) = verify(store, workers=1).problems
    assert "must have hash" in problem


def test_a_cases_own_record_that_is_damaged_is_told(store_in):
    store = store_in()
    (store / "cases/BRATS_000.json").write_text("{")
    (store / "cases/BRATS_001.json").unlink()
    (problem,) = verify(store, workers=1).problems
    assert "BRATS_000.json must hold the case's record" in problem


def test_files_of_no_case_are_told_as_harmless(store_in):
    store = store_in()
    for name in ("cases/BRATS_009.x.npy", "cases/.BRATS_000.x.npy.q.partial", "notes.txt", "cases/deep/file"):
        (store / name).parent.mkdir(exist_ok=True)
        (store / name).write_bytes(b"")
    found = verify(store, workers=1)
    assert found.problems == ()
    assert found.strays == tuple(
        sorted(["cases/BRATS_009.x.npy", "cases/.BRATS_000.x.npy.q.partial", "notes.txt", "cases/deep/file"])
    )


def test_arrays_that_entries_share_are_read_once_and_contradictions_between_entries_are_told(store_in, monkeypatch):
    store = store_in()
    repeat_entries(store, 4)
    read = []
    real = verify_module.array_problems
    monkeypatch.setattr(verify_module, "array_problems", lambda job: read.append(job.record.stem) or real(job))
    found = verify(store, workers=1)
    assert (found.problems, found.cases, found.arrays) == ((), 12, 3)
    assert read == ["BRATS_000", "BRATS_001", "BRATS_002"]
    edit_records(store, lambda lines: lines[5].update(channel_mean=[0.0] * 4))
    (problem,) = verify(store, workers=1).problems
    assert "case BRATS_001-001 must say of its arrays what case BRATS_001-000 says of the same, got another" in problem
    assert "channel_mean" in problem


def test_what_contradicts_the_manifest_is_told(store_in):
    store = store_in()
    content = json.loads((store / "manifest.json").read_text())
    del content["labels"]["3"]
    content["channels"] = content["channels"][:3]
    content["unlabelled"] = ["BRATS_001"]
    write_json(store / "manifest.json", sealed(content))
    told = "\n".join(verify(store, workers=1).problems)
    assert told.count("must have label codes of the store, got 3") == 3
    assert told.count("must have 3 channels, got 4") == 3
    assert "unlabelled in the manifest" in told
    assert "must follow from its records, (), got ('BRATS_001',)" in told


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("largest_box", [1, 1, 1], "largest_box in the manifest"),
        ("largest_shape", [999, 5, 4], "largest_shape in the manifest"),
        ("unlabelled", ["nobody"], "unlabelled in the manifest"),
        ("split_hash", "0" * 12, "must have hash 000000000000"),
        ("regions", {"WT": [1, 2, 9], "TC": [2], "ET": [3]}, "region WT in the manifest"),
    ],
)
def test_a_manifest_that_does_not_follow_from_its_records_is_told_even_where_it_was_sealed(store_in, name, value, told):
    store = store_in()
    content = json.loads((store / "manifest.json").read_text())
    write_json(store / "manifest.json", {**content, name: value})
    with pytest.raises(InputError, match="must be as it was written, got an edited one"):
        verify(store)
    write_json(store / "manifest.json", sealed({**content, name: value}))
    (problem,) = verify(store, workers=1).problems
    assert told in problem
    assert "restore" in problem


IMPOSSIBLE = [
    ("shape", [0, 0, 0]),
    ("shape", [-6, 5, 4]),
    ("shape", "x"),
    ("image_dtype", "x"),
    ("label_voxels", [1, 2]),
    ("centres", [1, 2]),
    ("image_bytes", None),
    ("patient_id", None),
    ("patient_id", ["p"]),
    ("stem", "../../outside"),
    ("stem", None),
    ("format", None),
    ("geometry", None),
    ("channel_mean", None),
    ("stored", {"start": [1e300, 0, 0], "size": [1, 1, 1]}),
    ("max_abs_error", "x"),
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_an_impossible_record_is_told_with_its_line_and_the_others_are_looked_at(store_in, name, value):
    store = store_in()
    edit_records(store, lambda lines: lines[1].update({name: value}))
    flip(store / "cases/BRATS_002.x.npy")
    told = "\n".join(verify(store, workers=1).problems)
    assert "must be complete in line 2, got" in told
    assert "BRATS_002.x.npy must be as it was written" in told
    with pytest.raises(InputError, match="in line 2; see `store verify`"):
        store_info(open_store(store), free_bytes=1 << 30)


def test_voxels_of_no_image_are_told_where_every_hash_was_made_to_fit(store_in):
    store = store_in()
    path = store / "cases/BRATS_001.x.npy"
    image = np.load(path)
    image[..., 2] = 0
    content = b"".join(map(bytes, encode(image, "npy")))
    path.write_bytes(content)
    hashes = {"image_sha256": hashlib.sha256(content).hexdigest(), "image_voxels_sha256": voxels_sha256(image)}
    edit_records(store, lambda lines: lines[1].update(hashes))
    assert "image of case BRATS_001 must have voxels in every channel" in "\n".join(verify(store, workers=1).problems)


def test_a_killed_process_is_told_with_its_case(store_in, monkeypatch):
    store = store_in()
    monkeypatch.setattr(verify_module, "run_jobs", lambda function, jobs, workers: [(job, KILLED) for job in jobs])
    assert ["BRATS_001 must fit into memory" in problem for problem in verify(store).problems] == [False, True, False]


def test_where_there_is_no_store_that_is_told(tmp_path):
    with pytest.raises(InputError, match="found none"):
        verify(tmp_path)


def test_a_failing_disk_is_told_with_the_file_and_the_others_are_read(store_in, monkeypatch):
    store = store_in()
    real = verify_module.file_sha256

    def failing(path):
        if path.name == "BRATS_001.x.npy":
            raise OSError(5, "Input/output error", str(path))
        return real(path)

    monkeypatch.setattr(verify_module, "file_sha256", failing)
    flip(store / "cases/BRATS_002.y.npy")
    problems = verify(store, workers=1).problems
    assert len(problems) == 2
    assert "BRATS_001.x.npy must be readable: [Errno 5]" in problems[0]
