"""The memory of a process, by kind."""

import mmap
from pathlib import Path

import pytest

from cpu3d.host.free_memory import take_sample
from cpu3d.host.memory import allocator_peak_bytes, peak_rss_bytes

MIB = 2**20


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
@pytest.mark.parametrize("sharing", [mmap.MAP_PRIVATE, mmap.MAP_SHARED])
def test_memory_that_is_written_to_counts_as_anonymous_and_raises_the_peak(sharing):
    before = take_sample()
    block = mmap.mmap(-1, 64 * MIB, flags=sharing | mmap.MAP_ANONYMOUS)
    block.write(b"1" * len(block))
    after = take_sample()
    block.close()
    assert 60 * MIB < after.own_bytes - before.own_bytes < 70 * MIB
    assert abs(after.file_bytes - before.file_bytes) < 8 * MIB
    assert peak_rss_bytes() >= after.own_bytes - after.swapped_bytes + after.file_bytes - MIB


@pytest.mark.parametrize(("peak", "counted"), [(5, 5), (0, None)])
def test_an_allocator_that_has_counted_nothing_has_no_peak(monkeypatch, peak, counted):
    import tensorflow as tf

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda device: {"peak": peak})
    assert allocator_peak_bytes() == counted
