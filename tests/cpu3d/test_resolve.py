"""What hangs on the number of workers: batch, learning rate, what is computed together."""

import pytest

from cpu3d.config import save_config
from cpu3d.data.sampling import Share
from cpu3d.errors import InputError
from cpu3d.resolve import resolve
from memory_estimator.host import read_host
from tests.cpu3d.runs import SMALL


def resolved(store, folder, workers, **settings):
    return resolve(store, folder, read_host(), {**SMALL, **settings}, None, workers=workers)


@pytest.mark.parametrize(
    ("settings", "rate"),
    [
        ({}, 0.02),  # Adam: the square root
        ({"optimizer": "sgd"}, 0.04),
        ({"rate_scaling": "linear"}, 0.04),
        ({"rate_scaling": "none"}, 0.01),
    ],
)
def test_the_batch_grows_with_the_workers_and_the_learning_rate_with_the_batch(phantom_store, tmp_path, settings, rate):
    config = resolved(phantom_store, tmp_path, 4, batch_per_worker=1, **settings)
    assert (config.batch, config.micro, config.parts) == (4, 1, 4)
    assert config.learning_rate == pytest.approx(rate)
    assert config.warmup_steps == SMALL["warmup_steps"]


def test_a_batch_of_all_workers_is_the_same_training_on_any_number_of_them(phantom_store, tmp_path):
    one, two, four = (resolved(phantom_store, tmp_path, workers, batch=4) for workers in (1, 2, 4))
    assert one == two == four
    orders = [[Share(rank, workers, one.batch).positions(4, 8) for rank in range(workers)] for workers in (1, 2, 4)]
    assert [sum(order, ()) for order in orders] == [(4, 5, 6, 7)] * 3


def test_a_run_that_continues_keeps_its_grown_rate_and_its_batch(phantom_store, tmp_path):
    config = resolved(phantom_store, tmp_path, 2, batch_per_worker=1)
    save_config(config, tmp_path)
    again = resolve(phantom_store, tmp_path, read_host(), {"batch_per_worker": 1}, None, workers=2)
    assert again == config
    assert resolved(phantom_store, tmp_path, 2, batch_per_worker=1) == config
    assert resolve(phantom_store, tmp_path, read_host(), {}, None, workers=1) == config
    with pytest.raises(InputError, match="batch must stay as the run was started, got 4 for 2"):
        resolve(phantom_store, tmp_path, read_host(), {"batch_per_worker": 1}, None, workers=4)


def test_a_recipe_that_is_named_again_comes_to_the_same_rate(phantom_store, tmp_path):
    def again():
        settings = {"batch_per_worker": 1, "depth": 3, "dtype": "float32"}
        return resolve(phantom_store, tmp_path, read_host(), settings, "demo", workers=4)

    config = again()
    save_config(config, tmp_path)
    assert again() == config


def test_batch_norm_sees_what_a_worker_computes_and_that_stays_as_it_was(phantom_store, tmp_path):
    config = resolved(phantom_store, tmp_path, 2, batch=4, norm="batch")
    assert (config.micro, config.parts) == (2, 2)
    save_config(config, tmp_path)
    assert resolve(phantom_store, tmp_path, read_host(), {}, None, workers=1).micro == 2
    with pytest.raises(InputError, match="micro-batch must divide the 1 volumes of a worker, got 2 of batch 4 on 4"):
        resolve(phantom_store, tmp_path, read_host(), {}, None, workers=4)


@pytest.mark.parametrize(
    ("workers", "settings", "message"),
    [
        (3, {"batch": 4}, "batch must be a multiple of the 3 workers, got 4; choose --batch-per-worker"),
        (2, {"batch": 4, "micro_batch": 4}, "micro-batch must divide the 2 volumes of a worker, got 4 of batch 4 on 2"),
        (1, {"rate_scaling": "sqrt"}, "--rate-scaling must come with --batch-per-worker, got sqrt"),
        (8, {"batch_per_worker": 2}, "batch must be at most the 4 training cases, got 16"),
    ],
)
def test_what_does_not_suit_the_workers_is_refused(phantom_store, tmp_path, workers, settings, message):
    with pytest.raises(InputError, match=message):
        resolved(phantom_store, tmp_path, workers, **settings)
