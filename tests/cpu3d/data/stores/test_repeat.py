"""The size of the largest published runs on BraTS: 484 cases a hundred and one times, 48,884 entries."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from cpu3d.data.records import remake
from cpu3d.data.store import open_store, write_store
from cpu3d.data.stores.prepare import prepare

ROOT = Path(__file__).resolve().parents[4]
CASES, TIMES = 484, 101

OPEN = """
import json, random, sys, time
from cpu3d.data.store import open_store
store = open_store(sys.argv[1])
opened_s = time.process_time()
def field(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(name))
peak_bytes = field("VmHWM")
picked, names = random.Random(0), store.manifest.split["train"]
def fetch(times):
    for _ in range(times):
        record = store.case(picked.choice(names))
        assert record.shape == store.image(record.case_id).shape[:3]
    return field("VmRSS")
after_bytes = [fetch(3000) for _ in range(3)]
cases, tensorflow = len(store.manifest.cases), "tensorflow" in sys.modules
found = {"opened_s": opened_s, "peak_bytes": peak_bytes, "after_bytes": after_bytes}
print(json.dumps({**found, "cases": cases, "tensorflow": tensorflow}))
"""


def test_a_store_of_48884_cases_opens_at_once_and_is_read_in_constant_memory(tmp_path, decathlon):
    few = tmp_path / "store"
    records = list(prepare(decathlon(tmp_path / "data"), few, fractions=(1, 1, 1), workers=1).cases)
    cases = [
        dataclasses.replace(
            records[number % 3],
            case_id=f"BRATS_{number:05d}",
            patient_id=f"{number % CASES:03d}",
            image_voxels_sha256=f"{number % CASES}",  # else identical images would be in two splits
        )
        for number in range(CASES * TIMES)
    ]
    split = {"train": [], "val": [], "test": []}
    for case in cases:
        patient = int(case.patient_id)
        split["train" if patient < 388 else "val" if patient < 436 else "test"].append(case.case_id)
    write_store(few, remake(open_store(few).manifest, cases=cases, split=split))
    command = [sys.executable, "-c", OPEN, str(few)]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=True).stdout)
    assert found["cases"] == CASES * TIMES == 48884
    assert not found["tensorflow"]
    assert found["opened_s"] < 30  # of CPU time, where a second is usual
    assert found["peak_bytes"] < 300 << 20
    # The first records fill the cache of parsed ones; from then on there is nothing left to grow.
    assert found["after_bytes"][2] < found["after_bytes"][0] + (4 << 20)
    assert found["after_bytes"][2] < 300 << 20
