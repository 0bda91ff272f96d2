"""How own operations are cut into pieces: for few threads as for many."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_estimator.calibration import load_constants
from memory_estimator.job import Job
from memory_estimator.step.cut import Work, cut_of
from memory_estimator.step.scratch import cut_for
from memory_estimator.step.timeline import OwnOperation
from memory_estimator.step.timing import step_busy_share
from memory_estimator.step.training_step import training_step
from models.config import UNetConfig
from models.native.shared import MOST_THREADS

WORKS = st.builds(
    Work,
    planes=st.integers(1, 300),
    rows=st.integers(1, 300),
    inputs=st.integers(1, 20),
    outputs=st.integers(1, 20),
    unit=st.integers(1, 3),
    border=st.integers(0, 1),
    products=st.integers(1, 20),
    together=st.sampled_from((0, 1, 4)),
    load=st.integers(0, 20),
    form_outputs=st.integers(0, 8),
    sums=st.integers(0, 300),
)


@given(WORKS, st.integers(1, 300))
def test_no_thread_is_without_work_and_the_largest_piece_is_large_enough(work, threads):
    cut = cut_of(work, threads)
    assert 1 <= cut.positions <= cut.pieces <= min(threads, MOST_THREADS)
    assert cut.pieces * cut.planes * cut.rows * cut.inputs * cut.outputs >= (
        work.planes * work.rows * work.inputs * work.outputs
    )
    assert cut_of(work, 1).pieces == 1
    assert 0 < cut.efficiency <= 1


def test_pieces_share_the_grid_first_and_channels_where_it_is_small():
    fine = Work(240, 240, border=1, products=8)
    assert cut_of(fine, 2) == cut_of(fine, 2)._replace(pieces=2, planes=120, rows=240)  # along x
    assert cut_of(fine, 56)[:5] == (56, 56, True, 30, 35)
    flat = Work(1, 1, inputs=4, outputs=6, border=1, products=8, form_outputs=1)
    of_flat = cut_of(flat, 8)
    assert of_flat.positions == 1
    assert of_flat.pieces == 8
    whole = Work(1, 1, outputs=6, unit=6, border=1, products=8)  # in place
    assert cut_of(whole, 8).pieces == 1


@pytest.mark.parametrize(
    ("columns", "instructions", "pieces", "busy"),
    [
        (16, "avx512", 1, 1 / 8),  # a block column of 32: 4 blocks of 8 x 32, for one thread
        (128, "avx512", 5, 5 / 8),  # four: 16 + 12 + 8 + 4 blocks, 8 for each of five threads
        (512, "avx512", 8, 1),  # sixteen: 544 blocks, 68 for each thread
        (128, "avx2", 8, 1),  # eight of 16: 144 blocks of 4 x 16, 18 for each thread
    ],
)
def test_a_kernel_is_made_orthogonal_by_threads_that_have_enough_blocks(
    columns, instructions, pieces, busy
):
    op = OwnOperation("orthogonal", 1, (27 * 64, 1, 1), 0, columns, 4)
    cut = cut_for(op, 8, instructions)
    assert cut.pieces == pieces
    assert cut.efficiency == pytest.approx(busy)


@pytest.mark.parametrize("instructions", ["avx2", "avx512", "avx512_bf16", "amx"])
@pytest.mark.parametrize("threads", [28, 56])
def test_a_step_keeps_the_cores_of_a_socket_busy(instructions, threads):
    job = Job(UNetConfig(dtype="bfloat16"), (240, 240, 160), threads=threads)
    program = training_step(job)
    for op in program.ops:
        if op.own and op.own.kind != "orthogonal":  # too small for so many
            cut = cut_for(op.own, threads, instructions, op.is_in_place)
            assert cut.efficiency > 0.55, op.own
    assert step_busy_share(program, load_constants(instructions), job) > 0.85
