import pytest

from cpu3d.compare.budget import (
    Budget,
    budget_of,
    step_voxels,
    steps_for,
    validate_every,
    voxels_of_epochs,
    warmup_within,
)
from cpu3d.config import RunConfig
from cpu3d.errors import InputError

WHOLE = RunConfig(grid=(144, 192, 144))


@pytest.mark.parametrize("patch", [(64, 64, 64), (96, 96, 80), (128, 128, 128), (144, 192, 144)])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_every_variant_sees_the_budget_to_within_a_step(patch, batch):
    config = RunConfig(grid=patch, batch=batch, mode="patch")
    voxels = voxels_of_epochs(25, WHOLE, cases=10)
    assert voxels == 25 * 10 * 144 * 192 * 144
    assert abs(steps_for(voxels, config) * step_voxels(config) - voxels) <= step_voxels(config)


def test_a_step_sees_its_whole_batch():
    assert steps_for(6000, RunConfig(grid=(10, 10, 10), batch=2)) == 3


def test_epochs_of_a_baseline_on_patches_are_of_all_its_patches():
    config = RunConfig(grid=(64, 64, 64), mode="patch", patches_per_case=15)
    assert steps_for(voxels_of_epochs(4, config, cases=3), config) == 4 * 3 * 15


@pytest.mark.parametrize(
    ("steps", "per_epoch", "validations", "every"), [(480, 16, 4, 8), (480, 16, 3, 10), (32, 16, 4, 1), (5, 16, 1, 1)]
)
def test_validations_are_spread_over_the_run(steps, per_epoch, validations, every):
    assert validate_every(steps, per_epoch, validations) == every
    times = {*range(every * per_epoch, steps + 1, every * per_epoch), steps}
    assert len(times) <= validations


@pytest.mark.parametrize(("warmup", "steps", "within"), [(10, 100, 10), (10, 99, 9), (10, 5, 0), (0, 5, 0)])
def test_a_warm_up_is_at_most_a_tenth(warmup, steps, within):
    assert warmup_within(warmup, steps) == within


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (Budget("epochs", 25), "the voxels of 25 epochs of whole"),
        (Budget("epochs", 1), "the voxels of 1 epoch of whole"),
        (Budget("voxels", 2e9), "2,000 million voxels"),
        (Budget("minutes", 60), "60 minutes of steps"),
    ],
)
def test_a_budget_says_what_of(budget, words):
    assert budget.words("whole") == words


def test_the_recipes_epochs_are_the_budget_where_none_is_named():
    assert budget_of(None, None, None, 100) == Budget("epochs", 100)
    assert budget_of(None, 2e9, None, 100) == Budget("voxels", 2e9)


def test_two_budgets_are_refused():
    with pytest.raises(InputError, match="--epochs and --minutes"):
        budget_of(3, None, 10, 100)


@pytest.mark.parametrize("amount", [0, -1, float("nan"), float("inf")])
def test_a_budget_that_is_none_is_refused(amount):
    with pytest.raises(InputError, match="--voxels must be positive"):
        budget_of(None, amount, None, 100)
