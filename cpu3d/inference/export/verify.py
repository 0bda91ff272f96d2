"""Whether an exported network says what `predict` says, on one case, asked in a fresh process."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Sequence

import numpy as np

from cpu3d.data.labels import label_from_regions
from cpu3d.data.records import CaseRecord
from cpu3d.data.region import crop, paste
from cpu3d.errors import InputError
from cpu3d.inference.evaluate import check_finite
from cpu3d.inference.export.contract import Contract

TOLERANCE = 1e-4
"""Largest difference of a probability from the same network in float32. In a brain of 144 x 176 x 128 voxels it is 2e-6
in ONNX and 0 as a SavedModel."""

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Case:
    """What both are asked about."""

    record: CaseRecord
    image: np.ndarray
    """(X, Y, Z, C), as `predict` has it: int16, or float16 after normalisation."""
    channels: Sequence[str]
    """Names of the image's channels."""


def check_fits(case: Case, exact: Any) -> None:
    """Raise InputError unless the network's size holds all that `predict` would show it of the case."""
    config, record = exact.config, case.record
    found = tuple(exact.region(record).size)
    if not config.is_patch and found != tuple(config.grid):
        what = "brain" if config.extent == "brain" else "volume"
        needed = record.box.size if config.extent == "brain" else record.shape
        raise InputError(
            f"case {record.case_id} must fit into {_by(config.grid)}, got a {what} of {_by(needed)}; export with --size"
            f" {' '.join(map(str, found))}, or name another --case"
        )


def verify(contract: Contract, format_: str, folder: Path, case: Case, exact: Any, own: Any) -> Dict[str, Any]:
    """What export.json tells of the verification; "passed" is whether the network may be used.

    `exact` and `own` are predictors at the exported size: in float32 and as `predict` has it, in the run's own dtype.
    Voxels are compared where the network looks. Raises InputError where the run's own answer is not finite.
    """
    region, shape = exact.region(case.record), case.record.shape
    begin = time.monotonic()
    answer = paste(_ask(contract, format_, folder, case, region), region, shape)
    seconds = time.monotonic() - begin
    expected = exact.probabilities(case.image, case.record, case.channels)
    check_finite(expected, case.record.case_id)
    in_own_dtype = own.probabilities(case.image, case.record, case.channels)
    label, voxels = label_from_regions(answer, contract.regions), int(np.prod(region.size))
    different = {
        name: int(np.count_nonzero(label != label_from_regions(other, contract.regions)))
        for name, other in (("float32", expected), ("predict", in_own_dtype))
    }
    finite = bool(np.isfinite(answer).all())
    largest = float(np.abs(answer - expected).max()) if finite else None
    return {
        "case_id": case.record.case_id,
        "passed": finite and largest <= TOLERANCE,
        "tolerance": TOLERANCE,
        "largest_difference": largest,
        "largest_difference_from_predict": float(np.abs(answer - in_own_dtype).max()) if finite else None,
        "voxels": voxels,
        "different_labels": different,
        "equal_labels": {name: 1 - count / voxels for name, count in different.items()},
        "label_voxels": int(np.count_nonzero(label)),
        "seconds": round(seconds, 3),
    }


# --- Private helpers ---


def _ask(contract: Contract, format_: str, folder: Path, case: Case, region: Any) -> np.ndarray:
    """Probabilities (X, Y, Z, R) of `region`, from a process that has the exported files and the voxels alone."""
    picked = [list(case.channels).index(name) for name in contract.config.channels]
    given = {"image": crop(case.image, region)[..., picked].astype(np.float32)}
    if contract.slides:
        given["mean"] = np.float32(case.record.channel_mean)[picked]
        given["std"] = np.float32(case.record.channel_std)[picked]
    with tempfile.TemporaryDirectory() as place:
        question, answer = Path(place) / "question.npz", Path(place) / "answer.npy"
        np.savez(question, **given)
        request = {
            "format": format_, "file": str(folder / contract.file), "output": contract.output,
            "window": contract.size if contract.slides else None, "question": str(question), "answer": str(answer),
        }  # fmt: skip
        command = [sys.executable, "-m", "cpu3d.inference.export.answer", json.dumps(request)]
        # TensorFlow with CUDA would take a card by itself, and the answer is held against one of the CPU.
        on_cpu = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
        done = subprocess.run(command, cwd=ROOT, env=on_cpu, capture_output=True, text=True, check=False)
        if done.returncode:
            told = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise NotReadableError(f"the exported network could not be run: exit code {done.returncode}, {told}")
        return np.load(answer, allow_pickle=False)


class NotReadableError(Exception):
    """The exported files do not run."""


def _by(size: Sequence[int]) -> str:
    return " x ".join(map(str, size))
