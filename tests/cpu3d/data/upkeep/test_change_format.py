import dataclasses
import errno

import numpy as np
import pytest

from cpu3d.data.prepare import prepare
from cpu3d.data.records import array_path
from cpu3d.data.resume import settings_of
from cpu3d.data.store import open_store, write_store
from cpu3d.data.upkeep import change_format as module
from cpu3d.data.upkeep.append import append
from cpu3d.data.upkeep.change_format import change_format
from cpu3d.data.upkeep.repeat import repeat_entries
from cpu3d.data.upkeep.verify import verify
from cpu3d.data.write_cases import FORMAT_CHOICES, Settings
from cpu3d.errors import InputError
from cpu3d.util.child import KILLED

THIRDS = {"fractions": (1, 1, 1), "workers": 1}


@pytest.fixture
def store(tmp_path, decathlon):
    prepare(decathlon(tmp_path / "data"), tmp_path / "store", **THIRDS)
    return tmp_path / "store"


@pytest.fixture
def counted(monkeypatch):
    """The stems that are converted, in order."""
    done = []
    real = module.convert_case
    monkeypatch.setattr(module, "convert_case", lambda job: done.append(job.record.stem) or real(job))
    return done


def content_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def of_store(folder):
    return {name: content for name, content in content_of(folder).items() if name != "conversion.json"}


@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize("format_", FORMAT_CHOICES)
def test_a_converted_store_is_bit_by_bit_the_one_that_prepare_would_have_made(tmp_path, store, format_, crop):
    prepare(tmp_path / "data", tmp_path / "direct", **THIRDS, settings=Settings(**FORMAT_CHOICES[format_], crop=crop))
    before = content_of(store)
    manifest = change_format(store, tmp_path / "new", format_=format_, crop=crop, workers=1)
    assert of_store(tmp_path / "new") == of_store(tmp_path / "direct")
    assert manifest == open_store(tmp_path / "direct").manifest
    assert verify(tmp_path / "new", workers=1).problems == ()
    assert content_of(store) == before


def test_a_round_trip_through_every_exact_format_ends_where_it_began(tmp_path, store):
    steps = [("b2nd", True), ("npy", True), ("b2nd", False), ("npy", False)]
    old, hashes = store, set()
    for number, (format_, crop) in enumerate(steps):
        new = tmp_path / str(number)
        hashes.add(change_format(old, new, format_=format_, crop=crop, workers=1).split_hash)
        old = new
    assert hashes == {open_store(store).manifest.split_hash}
    assert of_store(old) == of_store(store)


def test_what_is_not_asked_for_stays_as_it_is(tmp_path, store):
    change_format(store, tmp_path / "a", format_="b2nd", crop=True, workers=1)
    change_format(tmp_path / "a", tmp_path / "b", crop=False, workers=1)
    change_format(tmp_path / "b", tmp_path / "c", workers=1)
    assert settings_of(tmp_path / "a") == Settings("b2nd", True)
    assert settings_of(tmp_path / "b") == settings_of(tmp_path / "c") == Settings("b2nd", False)
    assert of_store(tmp_path / "b") == of_store(tmp_path / "c")


def test_rounding_is_within_the_recorded_error_and_changes_the_hash(tmp_path, store):
    old, new = open_store(store), change_format(store, tmp_path / "new", format_="float16", workers=1)
    assert new.split_hash != old.manifest.split_hash
    assert new.split == old.manifest.split
    for record in new.cases:
        before = old.image(record.case_id).astype(np.float64)
        after = open_store(tmp_path / "new").image(record.case_id).astype(np.float64)
        worst = 0.0
        for channel in range(4):
            inside = before[..., channel] != 0
            values = before[inside, channel]
            scores = (values - values.mean()) / values.std()
            worst = max(worst, np.abs(after[inside, channel] - scores).max())
            assert not after[~inside, channel].any()
        assert record.max_abs_error == pytest.approx(worst)
        assert 0 < worst < 1e-3


def test_what_was_rounded_has_no_way_back_but_can_be_packed_as_it_is(tmp_path, store):
    rounded = change_format(store, tmp_path / "rounded", format_="float16", workers=1)
    with pytest.raises(InputError, match=r"holds float16 scores: the source's values are gone"):
        change_format(tmp_path / "rounded", tmp_path / "back", format_="npy", workers=1)
    assert not (tmp_path / "back").exists()
    packed = change_format(tmp_path / "rounded", tmp_path / "packed", format_="b2nd", crop=True, workers=1)
    assert packed.split_hash == rounded.split_hash
    assert [case.image_dtype for case in packed.cases] == ["float16"] * 3
    for case in packed.cases:
        images = [open_store(tmp_path / name).image(case.case_id) for name in ("rounded", "packed")]
        assert np.array_equal(*images)
    assert settings_of(tmp_path / "packed") == Settings("b2nd", crop=True, scores=True)


def test_a_store_stays_float16_through_packing_and_what_is_added_to_it_is_float16_too(tmp_path, store, decathlon):
    change_format(store, tmp_path / "rounded", format_="float16", workers=1)
    change_format(tmp_path / "rounded", tmp_path / "packed", format_="b2nd", workers=1)
    with pytest.raises(InputError, match=r"holds float16 scores: .* unpack them with --format float16"):
        change_format(tmp_path / "packed", tmp_path / "back", format_="npy", workers=1)
    for number, format_ in enumerate((None, "b2nd", "float16")):
        change_format(tmp_path / "packed", tmp_path / f"{number}", format_=format_, workers=1)
    assert of_store(tmp_path / "0") == of_store(tmp_path / "1") == of_store(tmp_path / "packed")
    assert of_store(tmp_path / "2") == of_store(tmp_path / "rounded")
    append(tmp_path / "packed", decathlon(tmp_path / "more", 5), workers=1)
    cases = open_store(tmp_path / "packed").manifest.cases
    assert [(case.format, case.image_dtype) for case in cases] == [("b2nd", "float16")] * 5


def test_a_format_that_does_not_exist_is_refused(tmp_path, store):
    with pytest.raises(InputError, match="--format must be one of npy, float16, b2nd, got 'zip'"):
        change_format(store, tmp_path / "new", format_="zip", workers=1)


def test_two_processes_write_what_one_does(tmp_path, store):
    change_format(store, tmp_path / "one", format_="b2nd", workers=1)
    change_format(store, tmp_path / "two", format_="b2nd", workers=2)
    assert content_of(tmp_path / "one") == content_of(tmp_path / "two")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "writing stopped, No space left on device; 2 converted cases",
        ),
        (KeyboardInterrupt(), "2 converted cases kept in .* run the same command again"),
    ],
)
def test_what_was_cut_keeps_finished_cases_and_continues(tmp_path, store, counted, monkeypatch, error, told):
    real = module.write_arrays

    def cut_at_the_third(new, record, *rest, **settings):
        if record.stem == "BRATS_002":
            (new / "cases/.BRATS_002.x.npy.left.cpu3d.partial").write_bytes(b"half")
            raise error
        return real(new, record, *rest, **settings)

    monkeypatch.setattr(module, "write_arrays", cut_at_the_third)
    with pytest.raises(type(error), match=told):
        change_format(store, tmp_path / "new", crop=True, workers=1)
    assert not list((tmp_path / "new").rglob("*.partial"))
    with pytest.raises(InputError, match="found none"):
        open_store(tmp_path / "new")
    with pytest.raises(InputError, match="must be empty or begun by `prepare`"):
        prepare(tmp_path / "data", tmp_path / "new", **THIRDS)
    monkeypatch.setattr(module, "write_arrays", real)
    counted.clear()
    change_format(store, tmp_path / "new", crop=True, workers=1)
    assert counted == ["BRATS_002"]
    change_format(store, tmp_path / "whole", crop=True, workers=1)
    assert content_of(tmp_path / "new") == content_of(tmp_path / "whole")


@pytest.mark.parametrize("damage", ["missing", "short", "record"])
def test_a_case_damaged_since_it_was_finished_is_done_again(tmp_path, store, counted, damage):
    change_format(store, tmp_path / "new", workers=1)
    before = content_of(tmp_path / "new")
    (tmp_path / "new/manifest.json").unlink()
    path = tmp_path / "new/cases/BRATS_001.y.npy"
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        (tmp_path / "new/cases/BRATS_001.json").write_text("{}")
    counted.clear()
    change_format(store, tmp_path / "new", workers=1)
    assert counted == ["BRATS_001"]
    assert content_of(tmp_path / "new") == before


def test_a_finished_conversion_is_left_as_it_is(tmp_path, store, counted, capsys):
    first = change_format(store, tmp_path / "new", workers=1)
    before = content_of(tmp_path / "new")
    counted.clear()
    assert change_format(store, tmp_path / "new", workers=1) == first
    assert counted == []
    assert content_of(tmp_path / "new") == before
    assert "Nothing to do" in capsys.readouterr().out


def test_a_folder_that_holds_anything_else_is_refused_and_left_as_it_is(tmp_path, store):
    change_format(store, tmp_path / "new", format_="b2nd", workers=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_bytes(b"mine")
    (tmp_path / "partly").mkdir()
    for folder in ("other", "store", "data", "new", "partly"):
        (tmp_path / folder / ".film.mkv.partial").write_bytes(b"mine")
    for folder in ("other", "store", "data", "new", "partly"):
        before = content_of(tmp_path / folder)
        with pytest.raises(InputError, match="must be empty or"):
            change_format(store, tmp_path / folder, crop=True, workers=1)
        assert content_of(tmp_path / folder) == before


def test_a_process_killed_before_it_had_claimed_its_folder_leaves_one_that_can_be_used(tmp_path, store):
    (tmp_path / "new").mkdir()
    (tmp_path / "new/.conversion.json.abc.cpu3d.partial").write_bytes(b"{")
    change_format(store, tmp_path / "new", workers=1)
    assert not list((tmp_path / "new").glob(".*"))


def test_damaged_cases_are_all_told_and_the_good_ones_kept(tmp_path, store, counted):
    whole = content_of(store)
    (store / "cases/BRATS_000.x.npy").unlink()
    path = store / "cases/BRATS_001.y.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(InputError) as caught:
        change_format(store, tmp_path / "new", format_="b2nd", workers=1)
    told = str(caught.value)
    assert "BRATS_000.x.npy must exist" in told
    assert "voxels of case BRATS_001 of store" in told
    assert "1 converted case kept" in told
    for name, content in whole.items():
        (store / name).write_bytes(content)
    counted.clear()
    change_format(store, tmp_path / "new", format_="b2nd", workers=1)
    assert counted == ["BRATS_000", "BRATS_001"]


def test_an_old_disk_that_fails_is_told_with_the_case_and_the_others_are_converted(tmp_path, store, monkeypatch):
    real = module.Reader.array

    def failing(self, record, part):
        if record.case_id == "BRATS_001" and self.folder == store:
            raise OSError(errno.EIO, "Input/output error", "BRATS_001.x.npy")
        return real(self, record, part)

    monkeypatch.setattr(module.Reader, "array", failing)
    with pytest.raises(InputError, match=r"BRATS_001 of store .* must be readable, got .*output error") as caught:
        change_format(store, tmp_path / "new", workers=1)
    assert "2 converted cases kept" in str(caught.value)


def test_a_disk_that_gives_back_other_voxels_is_told_and_leaves_no_such_file(tmp_path, store, monkeypatch):
    real = module.write_arrays

    def corrupting(new, record, image, label, **settings):
        image = image.copy()
        image[2, 2, 2, 0] += 1
        return real(new, record, image, label, **settings)

    monkeypatch.setattr(module, "write_arrays", corrupting)
    with pytest.raises(OSError, match="what was read back is not what was written"):
        change_format(store, tmp_path / "new", workers=1)
    assert not list(tmp_path.glob("new/cases/*.x.*"))
    assert not list(tmp_path.glob("new/cases/*.json"))


def test_arrays_that_entries_share_are_converted_once(tmp_path, store, counted):
    repeat_entries(store, 3)
    old = open_store(store).manifest
    new = change_format(store, tmp_path / "new", format_="b2nd", crop=True, workers=1)
    assert counted == ["BRATS_000", "BRATS_001", "BRATS_002"]
    assert [case.case_id for case in new.cases] == [case.case_id for case in old.cases]
    assert (new.split, new.split_hash) == (old.split, old.split_hash)
    assert verify(tmp_path / "new", workers=1).problems == ()
    assert verify(tmp_path / "new", workers=1).strays == ()


def test_a_split_changed_by_hand_is_not_carried_on(tmp_path, store):
    manifest = open_store(store).manifest
    split = {"train": manifest.split["test"], "val": manifest.split["val"], "test": manifest.split["train"]}
    write_store(store, dataclasses.replace(manifest, split=split))
    with pytest.raises(InputError, match="must have hash"):
        change_format(store, tmp_path / "new", workers=1)


def test_what_was_left_out_of_the_old_store_is_known_to_the_new_one(tmp_path, store):
    (store / "quarantine.jsonl").write_text('{"case_id": "x", "reasons": ["bad"]}\n')
    change_format(store, tmp_path / "new", workers=1)
    assert (tmp_path / "new/quarantine.jsonl").read_bytes() == (store / "quarantine.jsonl").read_bytes()
    (store / "quarantine.jsonl").write_text("bad\n")
    with pytest.raises(InputError, match=r"quarantine\.jsonl must be JSON with a case_id and its reasons in line 1"):
        change_format(store, tmp_path / "other", workers=1)
    assert not (tmp_path / "other").exists()


def test_a_killed_process_is_told_with_its_case(tmp_path, store, monkeypatch):
    def killed(function, jobs, workers):
        yield from ((job, KILLED) for job in jobs)

    monkeypatch.setattr(module, "run_jobs", killed)
    with pytest.raises(InputError, match="case BRATS_001 must fit into memory") as caught:
        change_format(store, tmp_path / "new", workers=1)
    assert len(caught.value.problems) == 4


def test_prepare_recognises_a_converted_store_as_its_own(tmp_path, store, capsys):
    change_format(store, tmp_path / "new", format_="b2nd", crop=True, workers=1)
    prepare(tmp_path / "data", tmp_path / "new", **THIRDS, settings=Settings("b2nd", True))
    assert "Nothing to do" in capsys.readouterr().out
    record = open_store(tmp_path / "new").case("BRATS_001")
    path = array_path(tmp_path / "new", record, "x")
    content = path.read_bytes()
    path.unlink()
    prepare(tmp_path / "data", tmp_path / "new", **THIRDS, settings=Settings("b2nd", True))
    assert path.read_bytes() == content
