import numpy as np
import pytest

from cpu3d.data.store import open_store
from cpu3d.data.stores import conversion
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


def content_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize("format_", FORMAT_CHOICES)
def test_a_converted_store_is_bit_by_bit_the_one_that_prepare_would_have_made(tmp_path, store, format_, crop):
    prepare(tmp_path / "data", tmp_path / "direct", **THIRDS, settings=Settings(**FORMAT_CHOICES[format_], crop=crop))
    before = content_of(store)
    manifest = change_format(store, tmp_path / "new", format=format_, crop=crop, workers=1)
    assert content_of(tmp_path / "new") == content_of(tmp_path / "direct")
    assert manifest == open_store(tmp_path / "direct").manifest
    assert content_of(store) == before
    if format_ != "float16":
        change_format(tmp_path / "new", tmp_path / "back", format="npy", crop=False, workers=1)
        assert content_of(tmp_path / "back") == before


def test_what_was_rounded_has_no_way_back_but_can_be_packed_as_it_is(tmp_path, store):
    rounded = change_format(store, tmp_path / "rounded", format="float16", workers=1)
    assert rounded.split == open_store(store).manifest.split
    with pytest.raises(InputError, match=r"holds float16 scores: the source's values are gone"):
        change_format(tmp_path / "rounded", tmp_path / "back", format="npy", workers=1)
    assert not (tmp_path / "back").exists()
    packed = change_format(tmp_path / "rounded", tmp_path / "packed", format="b2nd", crop=True, workers=1)
    assert packed.split_hash == rounded.split_hash != open_store(store).manifest.split_hash
    for case in packed.cases:
        images = [open_store(tmp_path / name).image(case.case_id) for name in ("rounded", "packed")]
        assert images[1].dtype == np.float16
        assert np.array_equal(*images)
    assert settings_of(tmp_path / "packed") == Settings("b2nd", crop=True, scores=True)
    assert verify(tmp_path / "packed", workers=1) == ()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_was_cut_keeps_finished_cases_and_continues(tmp_path, store, monkeypatch, error):
    real, done = conversion.write_arrays, []

    def write(new, record, *rest, **settings):
        done.append(record.stem)
        if record.stem == "BRATS_002" and error is not None:
            (new / "cases/.BRATS_002.x.npy.left.cpu3d.partial").write_bytes(b"half")
            raise error
        return real(new, record, *rest, **settings)

    monkeypatch.setattr(conversion, "write_arrays", write)
    with pytest.raises(type(error), match=r"2 finished cases kept in .* run the same command again"):
        change_format(store, tmp_path / "new", crop=True, workers=1)
    assert not list((tmp_path / "new").rglob("*.partial"))
    with pytest.raises(InputError, match="found none"):
        open_store(tmp_path / "new")
    error, done[:] = None, []
    change_format(store, tmp_path / "new", crop=True, workers=1)
    assert done == ["BRATS_002"]
    change_format(store, tmp_path / "whole", crop=True, workers=1)
    assert content_of(tmp_path / "new") == content_of(tmp_path / "whole")


def test_a_folder_that_holds_anything_else_is_refused_and_left_as_it_is(tmp_path, store, decathlon):
    change_format(store, tmp_path / "new", format="b2nd", workers=1)
    (tmp_path / "partly").mkdir()
    (tmp_path / "partly/.film.mkv.partial").write_bytes(b"mine")
    prepare(decathlon(tmp_path / "four", 4), tmp_path / "others", **THIRDS, settings=Settings(crop=True))
    for folder in ("store", "data", "new", "partly", "others"):
        before = content_of(tmp_path / folder)
        with pytest.raises(InputError, match="choose another"):
            change_format(store, tmp_path / folder, crop=True, workers=1)
        assert content_of(tmp_path / folder) == before


def test_damaged_cases_are_all_named_and_the_good_ones_kept(tmp_path, store):
    whole = content_of(store)
    (store / "cases/BRATS_000.x.npy").unlink()
    path = store / "cases/BRATS_001.y.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(InputError) as caught:
        change_format(store, tmp_path / "new", format="b2nd", workers=1)
    missing, other, kept = caught.value.problems
    assert "BRATS_000.x.npy must exist" in missing
    assert "voxels of case BRATS_001 of store" in other
    assert "1 converted case kept" in kept
    for name, content in whole.items():
        (store / name).write_bytes(content)
    change_format(store, tmp_path / "new", format="b2nd", workers=1)
    assert verify(tmp_path / "new", workers=1) == ()
