"""Data sets that are recognised and refused before anything is written."""

import pytest

from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.unsupported import is_ignored
from cpu3d.errors import InputError
from tests.cpu3d.data.datasets import decathlon


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


def test_ignore_labels_are_refused_in_one_line(tmp_path):
    labels = {"0": "background", "1": "tumour", "255": "ignore"}
    data = decathlon(tmp_path / "data", labels=labels)
    store = tmp_path / "store"
    with pytest.raises(InputError, match=r"got 255 ignore; .* is not supported yet") as error:
        prepare(data, store, fractions=(1, 0, 0), workers=1, skip_bad=True)
    assert len(error.value.problems) == 1
    assert not (store / "manifest.json").exists()
