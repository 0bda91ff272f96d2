"""Scratch that stock TensorFlow leaves to oneDNN: what of it becomes resident."""

import dataclasses

import pytest

from memory_estimator.scratch import FilterGradient, hidden_filter_gradient_bytes, hidden_up_convolution_bytes

MIB = 2**20

JOB = FilterGradient(1, (96, 96, 96), (96, 96, 96), 16, 16, 3, 1, False)


def test_it_is_one_block_of_channels_of_both_maps():
    # Rows of 96 + 4 of padding, which neighbours share, in the source, of 96 in the target; 2 bytes each.
    rows = 96 * 96 * 16 * 2
    assert hidden_filter_gradient_bytes(JOB, "bfloat16", 2) in range(rows * (96 + 96), rows * (100 + 96) + 1)


def test_more_channels_take_no_more():
    for change in ({"in_channels": 32}, {"out_channels": 32}):
        assert hidden_filter_gradient_bytes(dataclasses.replace(JOB, **change), "bfloat16", 2) == (
            hidden_filter_gradient_bytes(JOB, "bfloat16", 2)
        )


def test_each_thread_fills_buffers_of_its_own_where_there_are_samples_enough():
    one = hidden_filter_gradient_bytes(JOB, "bfloat16", 2)
    found = [hidden_filter_gradient_bytes(dataclasses.replace(JOB, batch=n), "bfloat16", 2) for n in (2, 4)]
    assert found == [2 * one, 2 * one]


@pytest.mark.parametrize(
    ("side", "filters", "measured_mib"),
    # Peak of the process above its resting size: TensorFlow 2.15.1, two threads, the widest convolution of a network.
    [(96, 16, (55, 63)), (112, 8, (66, 88)), (128, 16, (126, 148)), (80, 32, (38, 40))],
)
def test_it_agrees_with_measured_processes(side, filters, measured_mib):
    shape = (side, side, side)
    job = FilterGradient(1, shape, shape, 2 * filters, filters, 3, 1, False)
    found = hidden_filter_gradient_bytes(job, "bfloat16", 2) / MIB
    assert measured_mib[0] - 8 <= found <= measured_mib[1] + 8


def test_float32_has_none_and_the_up_convolution_one_copy():
    assert hidden_filter_gradient_bytes(JOB, "float32", 2) == 0
    assert hidden_up_convolution_bytes(1000) == 1000
