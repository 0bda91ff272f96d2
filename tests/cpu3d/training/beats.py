"""Heartbeats as tests make them up."""

import dataclasses
import os
import time

from cpu3d.run.heartbeat import Heartbeat, process_start, this_place

GIB = 2**30


def beat(**changes):
    """A heartbeat of this process, a second ago, in step 120 of 4000."""
    now = time.time()
    pid = os.getpid()
    made_up = Heartbeat(
        rank=0,
        workers=1,
        pid=pid,
        process_start=process_start(pid),
        place=this_place(),
        host_name="node-17",
        started=now - 4000,
        beat=now - 1,
        phase="computing",
        phase_since=now - 3,
        step=120,
        steps=4000,
        longest_step_s=31.0,
        own_bytes=7 * GIB,
        peak_bytes=8 * GIB,
        bound_bytes=9 * GIB,
        free_bytes=14 * GIB,
    )
    return dataclasses.replace(made_up, **changes)
