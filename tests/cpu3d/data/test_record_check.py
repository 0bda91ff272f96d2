import json

import pytest

from cpu3d.data.record_check import check_record
from cpu3d.data.records import case_from_json, to_json

BAD = {
    "stem": ["../../outside", "a/b", "/etc/passwd", "", ".", "..", "a\0", None, 7, ["a"]],
    "case_id": ["../a", "", "..", None],
    "patient_id": [None, 7],
    "format": ["../x", "zip", "float16", None, ["npy"]],
    "image_dtype": ["x", "float32", "int8", None],
    "shape": [
        [0, 0, 0],
        [-4, 4, 4],
        [4, 4],
        [4, 4, 4, 1],
        "x",
        "xyz",
        [4.0, 4, 4],
        None,
        {},
        [5, 4, 4],
        [4, 4, 10**400],
    ],
    "box": [
        {"start": [0, 0, 0], "size": [4, 4, 5]},
        {"start": [-1, 0, 0], "size": [2, 2, 2]},
        {"start": [3, 3, 3], "size": [2, 1, 1]},
        {"start": [1, 1, 1], "size": [0, 1, 1]},
        {"start": [1, 1], "size": [1, 1, 1]},
        {"start": [1, 1, 1.5], "size": [1, 1, 1]},
        {"start": "abc", "size": [1, 1, 1]},
        {},
        None,
        [],
    ],
    "stored": [
        {"start": [0, 0, 0], "size": [5, 4, 4]},
        {"start": [1e300, 0, 0], "size": [4, 4, 4]},
        {"start": [1, 1, 2], "size": [2, 2, 2]},
        {"start": [2, 1, 1], "size": [2, 2, 3]},
    ],
    "channel_mean": [[], [1.0, 2.0], [float("nan")], ["1"], None, [10**400]],
    "channel_std": [[0.0], [-1.0], [float("inf")], [float("nan")], [None]],
    "channel_min": [[float("-inf")], {}, "1"],
    "channel_max": [[1.0, 2.0], [[1.0]]],
    "channel_voxels": [[-1], [1.5], [8, 8]],
    "spacing_mm": [[1.0, 1.0], [0.0, 1.0, 1.0], [float("nan"), 1.0, 1.0], [1.0, 1.0, float("inf")], None],
    "max_abs_error": [-0.5, float("nan"), "x", None],
    "zeroed_voxels": [-1, 0.5, None],
    "label_voxels": [[1, 2], {"0": 0}, {"0": -5}, {"0": 1.5}, {"x": 3}, {"-1": 3}, {"256": 3}, None, {}],
    "centres": [
        {"1": [[4, 0, 0]]},
        {"1": [[0, 0, -1]]},
        {"1": [[0, 0]]},
        {"1": [[0, 0, 0], [0, 0, 0, 0]]},
        {"1": [[0, 0, 1.5]]},
        {"1": ["abc"]},
        {"x": [[0, 0, 0]]},
        {"1": 5},
        [],
        None,
    ],
    "image_bytes": [0, -1, 1.5, None, "9"],
    "label_bytes": [0, -1, None],
    "label_sha256": [None, 7],
    "geometry": [None, {}, {"shape": [4, 4, 4]}],
    "sources": [
        [{}],
        None,
        [{"path": 1, "size_bytes": 1, "sha256": ""}],
        [{"path": "", "size_bytes": "", "sha256": ""}],
        [{"path": "", "size_bytes": 1, "sha256": "", "mtime_ns": 1.5}],
    ],
}


@pytest.fixture
def content(make_record):
    """A good record's JSON content."""
    return json.loads(json.dumps(to_json(make_record())))


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_record_with_one_impossible_value_is_refused(content, name, value):
    check_record(content)
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        case_from_json({**content, name: value})


@pytest.mark.parametrize("name", ["shape", "stem", "box", "centres", "sources", "label_bytes", "channel_max"])
def test_a_record_without_one_of_its_fields_is_refused(content, name):
    del content[name]
    with pytest.raises(KeyError):
        case_from_json(content)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shape", [4, 4, 5]),
        ("shape", [4, 4]),
        ("axes", "RA"),
        ("axes", None),
        ("affine", [[1.0, 0.0, 0.0, 0.0]] * 3),
        ("affine", [[float("nan"), 0.0, 0.0, 0.0]] * 4),
        ("affine", [[10**400, 0.0, 0.0, 0.0]] * 4),
        ("sform_code", None),
        ("forms", [0.0] * 21),
        ("forms", [float("nan")] * 22),
        ("qform_code", 1.5),
    ],
)
def test_a_record_of_an_impossible_grid_is_refused(content, name, value):
    content["geometry"][name] = value
    with pytest.raises((TypeError, ValueError)):
        case_from_json(content)


def test_a_case_in_no_store_yet_and_one_without_a_label_are_records(content):
    unlabelled = {"label_voxels": {}, "centres": {}, "label_bytes": 0, "label_sha256": "", "label_voxels_sha256": ""}
    check_record({**content, **unlabelled})
    check_record({**content, "format": "", "image_bytes": 0, "label_bytes": 0, "image_sha256": ""})
    check_record({**content, "geometry": {**content["geometry"], "sform_code": 0}, "sources": []})
