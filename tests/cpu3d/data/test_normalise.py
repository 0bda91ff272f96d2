"""What a stored value becomes by the kind of its channel, and what surrounds a volume: by hand."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from cpu3d.data.normalise import Kind, Normalisation, Statistics, ct_of, levels_of, normalise
from cpu3d.data.region import Region
from cpu3d.data.store import open_store, write_store
from tests.cpu3d.data.made_datasets import make_record, manifest_of

CT = Normalisation(Kind.CT, -100.0, 300.0, 50.0, 25.0)
OF_KINDS = [Normalisation(kind) if kind is not Kind.CT else CT for kind in Kind]


@pytest.mark.parametrize(
    ("kind", "values", "around"),
    [
        # Of mean 4 over the foreground and 3 over all, deviation 2, with 2 at the border.
        (Normalisation(), [0, -1, 0, 1], 0),
        (Normalisation(Kind.ZSCORE), [-1.5, -0.5, 0.5, 1.5], -0.5),
        (Normalisation(Kind.NONE), [0, 2, 4, 6], 2),
        (Normalisation(Kind.RESCALE), [0, 1 / 3, 2 / 3, 1], 1 / 3),
        (Normalisation(Kind.CT, 1.0, 5.0, 3.0, 2.0), [-1, -0.5, 0.5, 1], -1),
    ],
)
def test_values_and_padding_of_each_kind_are_those_by_hand(kind, values, around):
    image = np.array([0, 2, 4, 6], np.int16).reshape(1, 1, 4, 1)
    low, mean = (2.0, 4.0) if kind.has_background else (0.0, 3.0)
    around_stored = 0.0 if kind.has_background else 2.0
    record = SimpleNamespace(statistics=(Statistics(mean, 2.0, low, 6.0, around_stored),))
    made = normalise(image, record, Region((0, -1, -1), (1, 2, 6)), (kind,))
    assert made.dtype == np.float32
    np.testing.assert_allclose(made[0, 1, :, 0], [around, *values, around], rtol=1e-6)
    np.testing.assert_allclose(made[0, 0], around, rtol=1e-6)


@pytest.mark.parametrize("kind", OF_KINDS, ids=lambda kind: kind.kind.value)
def test_a_source_in_steps_gives_what_its_values_give(kind):
    own = Statistics(mean=80.0, std=40.0, low=0.0, high=200.0, around=10.0)
    steps = Statistics(mean=-240, std=80, low=-400, high=0, around=-380, step=0.5, offset=200)
    stored = 2 * np.arange(200) - 400
    if kind.has_background:
        own = own._replace(around=0.0)
        steps = Statistics(mean=160, std=80, low=0, high=400, step=0.5)
        stored = 2 * np.arange(200)

    def made(values, statistics):
        image = values.astype(np.int16).reshape(10, 10, 2, 1)
        record = SimpleNamespace(statistics=(statistics,))
        return normalise(image, record, Region((-1, 0, 0), (11, 10, 2)), (kind,))

    np.testing.assert_allclose(made(stored, steps), made(np.arange(200), own), atol=1e-4)


def test_a_ct_is_clipped_to_percentiles_of_the_pooled_foreground_and_each_case_counts_alike():
    rng = np.random.default_rng(0)
    samples = [np.sort(rng.integers(-200, 400, 1000)).tolist() for _ in range(3)]
    made = ct_of(samples, "why")
    pooled = np.concatenate(samples)
    assert (made.low, made.high) == tuple(np.percentile(pooled, (0.5, 99.5), method="lower"))
    assert (made.mean, made.std) == (pytest.approx(pooled.mean()), pytest.approx(pooled.std()))
    levels = levels_of([Statistics(0, 1, 0, 1)], [made])
    ends = np.array([[made.low, made.high]])
    np.testing.assert_allclose(levels.limits, (ends - made.mean) / made.std)


@pytest.mark.parametrize("samples", [[], [[5.0] * 10], [[5.0] * 1000 + [6.0]]])
def test_a_ct_needs_values_that_differ(samples):
    with pytest.raises(ValueError, match=r"none|5 in most"):
        ct_of(samples)


# --- In a store ---


@pytest.mark.parametrize("kind", OF_KINDS[1:], ids=lambda kind: kind.kind.value)
def test_a_store_keeps_kinds_and_reasons_and_its_hash_covers_the_kinds(tmp_path, kind):
    told = dataclasses.replace(kind, why="by its name", is_chosen=True)
    record = make_record(around=(1.0,), units=((0.5, 2.0),), foreground=((1.0, 2.0),))
    manifest = manifest_of([record], normalisation=(told,))
    write_store(tmp_path, manifest)
    read = open_store(tmp_path).manifest
    assert [vars(each) for each in read.normalisation] == [vars(told)]
    assert read.cases == (record,)
    assert CT.words == "ct, window -100 to 300, mean 50, deviation 25"
    without_reason = manifest_of([record], normalisation=(kind,))
    assert read.split_hash == without_reason.split_hash != manifest_of([record]).split_hash
