"""Which files make up a case to predict, by their names alone: the files here are empty."""

import pytest

from cpu3d.errors import InputError
from cpu3d.inference.cases import case_files, grouped_by_case, label_codes_of

CANONICAL = ("FLAIR", "T1w", "T1gd", "T2w")


@pytest.fixture
def make(tmp_path):
    """make("x/x_flair", ...): empty .nii.gz files of these names."""

    def touch(*names):
        paths = [tmp_path / f"{name}.nii.gz" for name in names]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return paths

    return touch


def stems(paths):
    return [path.name[: -len(".nii.gz")] for path in paths]


def test_a_case_may_be_a_folder_of_either_release_in_any_channel_spelling(make):
    folder = make("x/x_flair", "x/x_t1", "x/x_t1ce", "x/x_t2", "x/x_seg")[0].parent
    case = case_files([folder], ("T2w", "t1gd", "FLAIR"))
    assert stems(case.images) == ["x_t2", "x_t1ce", "x_flair"]
    assert (case.case_id, case.label) == ("x", None)
    assert label_codes_of(case)[0] == "brats2017"
    folder = make("y/y-t2f", "y/y-t1c")[0].parent
    assert label_codes_of(case_files([folder], ("FLAIR", "T1gd")))[0] == "brats2023"


def test_files_are_put_in_order_by_their_names_or_taken_in_theirs(make):
    shuffled = make("x/x-seg", "x/x-t2w", "x/x-t1c", "x/x-t1n", "x/x-t2f")
    case = case_files(shuffled, CANONICAL)
    assert (case.case_id, stems(case.images)) == ("x", ["x-t2f", "x-t1n", "x-t1c", "x-t2w"])
    plain = make("c", "a", "b")
    assert stems(case_files(plain, ("one", "two", "three")).images) == ["c", "a", "b"]
    assert case_files(plain[:1], CANONICAL).case_id == "c"
    assert grouped_by_case(plain, ("CT",)) == [[path] for path in plain]
    assert grouped_by_case(shuffled, ("FLAIR",)) == [shuffled[-1:]]
    assert grouped_by_case(shuffled, CANONICAL) == [shuffled]


def test_files_that_do_not_match_the_channels_are_refused(make):
    flair, t1 = make("x/x-t2f", "x/x-t1n")
    with pytest.raises(InputError) as caught:
        case_files([flair.parent], CANONICAL)
    assert [problem.split()[0] for problem in caught.value.problems] == ["T1gd", "T2w"]
    plain = make("a", "b", "c", "d")
    with pytest.raises(InputError, match="got 2 files"):
        case_files(plain[:2], CANONICAL)
    with pytest.raises(InputError, match="got a name of T1w"):
        case_files([t1, plain[0]], ("FLAIR", "T1w"))


def test_codes_are_not_known_of_paediatric_cases_nor_of_files_of_other_names(make):
    folder = make("BraTS-PED-00001-000/BraTS-PED-00001-000-t2f")[0].parent
    for paths in ([folder], make("scan")):
        assert label_codes_of(case_files(paths, ("FLAIR",))) is None
