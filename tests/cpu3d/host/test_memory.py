"""The memory of a process, by kind."""

import mmap
import os
from pathlib import Path

import pytest

from cpu3d.host.memory import allocator_peak_bytes, peak_rss_bytes, resident

MIB = 2**20

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")


@pytest.mark.parametrize("sharing", [mmap.MAP_PRIVATE, mmap.MAP_SHARED])
def test_memory_that_is_written_to_counts_as_anonymous_and_raises_the_peak(sharing):
    before = resident()
    peak = peak_rss_bytes()
    block = mmap.mmap(-1, 64 * MIB, flags=sharing | mmap.MAP_ANONYMOUS)
    for page in range(0, len(block), 4096):
        block[page] = 1
    after = resident(os.getpid())
    assert 60 * MIB < after.anonymous_bytes - before.anonymous_bytes < 70 * MIB
    assert abs(after.file_bytes - before.file_bytes) < 8 * MIB
    assert peak_rss_bytes() >= max(peak, after.total_bytes - MIB)
    block.close()
    assert resident().anonymous_bytes < after.anonymous_bytes - 50 * MIB
    assert peak_rss_bytes() >= after.total_bytes - MIB


def test_a_process_that_has_ended_holds_nothing():
    assert resident(2**22 + 1) is None


@pytest.mark.parametrize(("peak", "counted"), [(2**20, 2**20), (0, None), (-(2**20), None)])
def test_an_allocator_that_has_counted_nothing_has_no_peak(monkeypatch, peak, counted):
    import tensorflow as tf

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda device: {"peak": peak})
    assert allocator_peak_bytes() == counted
