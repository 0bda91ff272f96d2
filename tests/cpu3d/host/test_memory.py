"""What a process holds, told apart by kind, and what is live over a step."""

import mmap
import os
from pathlib import Path

import pytest

from cpu3d.host.memory import most_in_each_part, peak_rss_bytes, resident

MIB = 2**20

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")


def test_memory_that_is_written_to_counts_as_anonymous_and_raises_the_peak():
    before, peak = resident(), peak_rss_bytes()
    block = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
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


def test_the_bytes_live_over_a_step_are_the_most_in_each_of_its_parts():
    """A step of 3 s: 10 bytes, at 1 s for an instant 30, then 20; each part begins with what was held before it."""
    parts = most_in_each_part([(0.0, 10), (1.0, 30), (1.001, 20), (3.0, 20)], 300)
    assert (len(parts), parts[0], parts[99], parts[100], parts[101], parts[-1]) == (300, 10, 10, 30, 20, 20)
    assert sum(part == 30 for part in parts) == 1
