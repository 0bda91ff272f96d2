import pytest

from cpu3d.data.stores.layouts import parse_label_map, read_dataset, with_label_map
from cpu3d.errors import InputError


@pytest.fixture
def brats2021(tmp_path, brats_case):
    brats_case(tmp_path / "a", "brats2017")
    return read_dataset(tmp_path)


@pytest.mark.parametrize("pair", ["", "4", "4=", "4:3", "-1=3", "4=3.0", "256=1", "4=256", "4=3=2", "0=1"])
def test_what_is_no_pair_of_codes_is_refused_all_at_once(pair):
    with pytest.raises(InputError, match=r"OLD=NEW of codes 1\.\.255 and 0\.\.255") as error:
        parse_label_map([pair, "1=2", "x"])
    assert len(error.value.problems) == 2
    with pytest.raises(InputError, match="code 4 one meaning, got 3 and 2"):
        parse_label_map(["4=3", "4=2"])


def test_a_name_goes_with_its_code_where_the_new_one_has_none(brats2021):
    mapped = with_label_map(brats2021, {4: 3})
    assert mapped.labels == {
        0: "background",
        1: "necrotic and non-enhancing tumour core",
        2: "oedema",
        3: "enhancing tumour",
    }
    assert mapped.regions == {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)}
    assert mapped.cases == brats2021.cases


@pytest.mark.parametrize(
    ("label_map", "codes"),
    [
        ({}, (0, 1, 2, 4)),
        ({9: 4}, (0, 1, 2, 4)),  # a code that the data set has no name for falls together with one that has
        ({1: 2, 2: 1}, (0, 1, 2, 4)),
        ({1: 2}, (0, 2, 4)),
        ({1: 0, 2: 0}, (0, 4)),
        ({1: 2, 2: 4}, (0, 2, 4)),
    ],
)
def test_codes_change_all_at_once_and_one_onto_which_nothing_falls_is_gone(brats2021, label_map, codes):
    mapped = with_label_map(brats2021, label_map)
    assert tuple(mapped.labels) == codes
    assert all(mapped.labels[code] == brats2021.labels[code] for code in codes)


def test_a_code_without_a_name_and_a_map_onto_background_alone_are_refused(brats2021):
    with pytest.raises(InputError, match=r"--label-map 9=7 must lead to a code with a name \(0 background, 1 nec.* 7;"):
        with_label_map(brats2021, {9: 7})
    with pytest.raises(InputError, match="leave a label beside the background"):
        with_label_map(brats2021, {1: 0, 2: 0, 4: 0})
