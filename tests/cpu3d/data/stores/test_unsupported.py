"""Data sets that are recognised and refused before anything is written."""

import numpy as np
import pytest

from cpu3d.data.stores.names import is_ignored
from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.unsupported import is_ct
from cpu3d.data.stores.upkeep import append
from cpu3d.errors import InputError
from tests.cpu3d.data.datasets import decathlon, tiny_image, tiny_label, write_nifti

LABELS = {"0": "background", "1": "tumour"}


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        *[(name, True) for name in ("CT", "ct", "Computed Tomography", "CT_portal", "portalCT")],
        *[(name, True) for name in ("PET/CT", "ct (HU)", "DECT")],
        *[(name, False) for name in ("CT1", "T1ct", "FLAIR", "contrast", "MRI", "direct")],
    ],
)
def test_a_channel_is_ct_by_its_name(name, answer):
    assert is_ct(name) is answer


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        *[(name, True) for name in ("ignore", "Ignore label", "void", "unlabelled", "Don't care")],
        *[(name, True) for name in ("unknown", "not annotated", "void / ignore", "ignore_index")],
        *[(name, True) for name in ("excluded", "not used", "do not use", "background (ignore)")],
        *[(name, False) for name in ("tumour", "unknown tumour", "avoid", "background")],
    ],
)
def test_a_label_is_ignored_by_its_name(name, answer):
    assert is_ignored(name) is answer


def one_channel(folder, channel="MRI", labels=LABELS, **images):
    """A data set of 3D images; `images` are voxels of cases in the place of a usual image."""
    names = [f"c_{number}" for number in range(3)]
    entries = [{kind: f"{kind}sTr/{name}.nii.gz" for kind in ("image", "label")} for name in names]
    decathlon(folder, 0, modality={"0": channel}, labels=labels, training=entries)
    for seed, name in enumerate(names):
        write_nifti(folder / f"imagesTr/{name}.nii.gz", images.get(name, tiny_image(seed)))
        write_nifti(folder / f"labelsTr/{name}.nii.gz", tiny_label(1))
    return folder


def in_hounsfield_units(seed):
    """Air around soft tissue, with noise."""
    noise = np.random.default_rng(seed).integers(-5, 5, (6, 5, 4))
    return (tiny_image(seed) // 10 - 1024 + noise).astype(np.int16)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"channel": "ct_venous"}, "must not be CT, got ct_venous; .* CT is not supported yet"),
        (
            {f"c_{n}": in_hounsfield_units(n) for n in range(3)},
            "must not be CT.* -1000 .*c_0.* is not supported yet",
        ),
    ],
)
def test_ct_is_refused_in_one_line(tmp_path, how, message):
    data = one_channel(tmp_path / "data", **how)
    store = tmp_path / "store"
    with pytest.raises(InputError, match=message) as error:
        prepare(data, store, fractions=(1, 0, 0), workers=1, skip_bad=True)
    assert len(error.value.problems) == 1
    assert not (store / "manifest.json").exists()


def test_one_case_of_ct_among_others_is_a_bad_case(tmp_path):
    data = one_channel(tmp_path / "data", c_1=in_hounsfield_units(1))
    with pytest.raises(InputError, match=r"c_1\.nii\.gz must not be CT"):
        prepare(data, tmp_path / "store", fractions=(1, 0, 0), workers=1)
    manifest = prepare(data, tmp_path / "store", fractions=(1, 0, 0), workers=1, skip_bad=True)
    assert [case.case_id for case in manifest.cases] == ["c_0", "c_2"]
    more = one_channel(tmp_path / "more", **{f"c_{n}": in_hounsfield_units(n) for n in range(3)})
    for case in (more / "imagesTr").iterdir():
        case.rename(case.with_name(f"new{case.name}"))
        label = more / "labelsTr" / case.name
        label.rename(label.with_name(f"new{case.name}"))
    text = (more / "dataset.json").read_text().replace("/c_", "/newc_")
    (more / "dataset.json").write_text(text)
    with pytest.raises(InputError, match=r"must not be CT.*newc_0"):
        append(tmp_path / "store", more, workers=1)
