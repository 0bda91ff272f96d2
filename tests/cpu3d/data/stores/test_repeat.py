"""The size of the largest published runs on BraTS: 484 cases a hundred and one times, 48,884 entries."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cpu3d.data.records import remake
from cpu3d.data.store import open_store, write_store
from cpu3d.data.stores.prepare import prepare
from cpu3d.data.stores.upkeep import repeat_entries

ROOT = Path(__file__).resolve().parents[4]
CASES, TIMES = 484, 101

OPEN = """
import json, sys, time
from cpu3d.data.store import open_store
store = open_store(sys.argv[1])
opened_s = time.process_time()
def field(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))
peak_bytes = field("VmHWM")
import random
picked = random.Random(0)
names = store.manifest.split["train"]
def fetch(times):
    for _ in range(times):
        record = store.case(picked.choice(names))
        assert record.shape == store.image(record.case_id).shape[:3]
    return field("VmRSS")
after_bytes = [fetch(3000) for _ in range(3)]
print(json.dumps({
    "opened_s": opened_s, "peak_bytes": peak_bytes, "after_bytes": after_bytes, "cases": len(store.manifest.cases),
    "tensorflow": "tensorflow" in sys.modules,
}))
"""


@pytest.fixture
def few(tmp_path, decathlon):
    prepare(decathlon(tmp_path / "data"), tmp_path / "store", fractions=(1, 1, 1), workers=1)
    return tmp_path / "store"


def test_entries_share_arrays_patients_and_splits_with_their_case(few):
    old = open_store(few)
    manifest = repeat_entries(few, 2)
    store = open_store(few)
    assert store.manifest == manifest
    store.check_split()
    store.check(manifest.cases)
    assert manifest.split["train"] == tuple(f"{one}-{k:03d}" for one in old.manifest.split["train"] for k in range(2))
    for case_id in ("BRATS_001-000", "BRATS_001-001"):
        assert store.case(case_id).patient_id == old.case("BRATS_001").patient_id
        assert store.case(case_id).stem == "BRATS_001"
        assert np.array_equal(store.image(case_id), old.image("BRATS_001"))
    assert len(list(few.glob("cases/*.x.npy"))) == 3


def test_a_store_of_48884_cases_opens_at_once_and_is_read_in_constant_memory(few):
    records = list(open_store(few).manifest.cases)
    cases = [
        dataclasses.replace(
            records[number % 3],
            case_id=f"BRATS_{number:03d}",
            patient_id=f"{number:03d}",
            image_voxels_sha256=f"{number}",  # else identical images would be in two splits
        )
        for number in range(CASES)
    ]
    ids = [case.case_id for case in cases]
    split = {"train": ids[:388], "val": ids[388:436], "test": ids[436:]}
    write_store(few, remake(open_store(few).manifest, cases=cases, split=split))
    repeat_entries(few, TIMES)
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(few)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    told = json.loads(done.stdout)
    assert told["cases"] == CASES * TIMES == 48884
    assert not told["tensorflow"]
    assert told["opened_s"] < 30  # of CPU time, where a second is usual
    assert told["peak_bytes"] < 300 << 20
    # The first records fill the cache of parsed ones; from then on there is nothing left to grow.
    assert told["after_bytes"][2] < told["after_bytes"][0] + (4 << 20)
    assert told["after_bytes"][2] < 300 << 20
