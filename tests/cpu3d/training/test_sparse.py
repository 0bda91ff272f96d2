"""Phantoms of which every tenth slice is annotated are learnt nearly as well as whole ones."""

import shutil

import nibabel
import numpy as np
import pytest

from cpu3d.data.phantoms.command import write_phantom
from cpu3d.data.store import open_store
from cpu3d.data.stores.prepare import prepare
from cpu3d.inference.evaluate import evaluate_split
from cpu3d.inference.predictor import load_predictor
from tests.cpu3d.data.made_datasets import dataset_json
from tests.cpu3d.runs import start, steps_of

SPLIT = {"fractions": (0.7, 0.15, 0.15), "workers": 1}
SLICES = 10  # from one that is annotated to the next


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two stores of the same cases, of which those to train on are annotated wholly or in part."""
    folder = tmp_path_factory.mktemp("sparse")
    whole = folder / "whole"
    sparse = folder / "sparse"
    write_phantom(whole, cases=8, shape=(40, 48, 36), seed=5, workers=1)
    split = prepare(whole, folder / "whole store", **SPLIT).split
    shutil.copytree(whole, sparse)
    with dataset_json(sparse) as about:
        about["labels"]["255"] = "not annotated"
    for number, case_id in enumerate(split["train"]):
        (path,) = (sparse / "labelsTr").glob(f"{case_id}.nii*")
        image = nibabel.load(path)
        label = np.asarray(image.dataobj).astype(np.uint8)
        is_annotated = np.arange(label.shape[2]) % SLICES == 3 * number % SLICES
        label[..., ~is_annotated] = 255
        nibabel.save(nibabel.Nifti1Image(label, image.affine), path)
    assert prepare(sparse, folder / "sparse store", **SPLIT).split == split
    return open_store(folder / "whole store"), open_store(folder / "sparse store")


def test_untouched_whole_cases_are_answered_nearly_as_well(stores, tmp_path):
    dice = []
    for number, store in enumerate(stores):
        run = tmp_path / f"run-{number}"
        run.mkdir()
        start(store, run, steps=40, filters=8, validations=1).run()
        assert all(np.isfinite(step["loss"]) for step in steps_of(run))
        scores = evaluate_split(load_predictor(run, "last"), store, "test", run)
        dice.append(scores["summary"]["WT"]["dice"]["mean"])
    whole, sparse = dice
    assert whole > 0.6
    assert sparse > whole - 0.15
