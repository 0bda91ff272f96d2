import errno

import numpy as np
import pytest

from cpu3d.data.store import open_store
from cpu3d.data.stores import upkeep as module
from cpu3d.data.stores.conversion import FORMAT_CHOICES, Settings, settings_of
from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.upkeep import change_format
from cpu3d.data.stores.verify import verify
from cpu3d.errors import InputError

THIRDS = {"fractions": (1, 1, 1), "workers": 1}


@pytest.fixture
def store(tmp_path, decathlon):
    prepare(decathlon(tmp_path / "data"), tmp_path / "store", **THIRDS)
    return tmp_path / "store"


@pytest.fixture
def counted(monkeypatch):
    """The stems that are converted, in order."""
    done = []
    real = module.write_arrays
    monkeypatch.setattr(
        module,
        "write_arrays",
        lambda new, record, *more, **how: done.append(record.stem) or real(new, record, *more, **how),
    )
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


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "writing stopped, No space left on device; 2 finished cases",
        ),
        (KeyboardInterrupt(), "2 finished cases kept in .* run the same command again"),
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
