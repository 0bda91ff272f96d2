"""Makes a sample of a training from stored voxels, on one thread: by C, or by NumPy where there is
no library and none can be built.

    stored -> normalised -> turned and zoomed
           -> noise, blur, low resolution, contrast, gamma -> limited -> mirrored -> rounded

Without a drawn turn nothing is interpolated: an image's values are those of `normalise.normalise`.
A target's region is where its mean over a voxel, interpolated like the image, is at least 1/2.

Voxels that are not to be learnt have no say in that: the mean is over the others. A voxel is
IGNORED in all regions where more than half of what it is turned from is not to be learnt. What is
around a volume is background, and learnt.
"""

import ctypes
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.augment import AugmentParams
from cpu3d.data.files.arrays import aligned_empty
from cpu3d.data.native import plain
from cpu3d.data.native.spec import ImageAndTarget, SampleSpec, Stored
from cpu3d.data.region import Array, Shape3
from memory_estimator.host import read_host
from models.native.build import build_library
from models.native.instruction_sets import INSTRUCTION_SETS

SOURCES = Path(__file__).resolve().parent
INT16, LABEL, WINDOWED = range(3)  # as in samples.h


def make_sample(stored: Stored, drawn: AugmentParams, spec: SampleSpec) -> ImageAndTarget:
    """Make the sample of the numbers that were drawn for it. Threads may call it; while C
    computes, others run.

    `drawn` are the numbers of all channels of the store. Raises MemoryError.
    """
    function = function_in_c()
    drawn = drawn.of_channels(spec.channels)
    if function is None:
        return plain.make_sample(stored, drawn, spec)
    stored_as = np.uint16 if spec.is_bfloat16 else np.float32
    image = aligned_empty((*spec.grid, len(spec.channels)), stored_as)
    target = aligned_empty((*spec.grid, len(spec.codes)), np.uint8)
    target.fill(0)
    call = _Call(stored, drawn, spec, image, target)  # holds the arrays that C reads
    if function(ctypes.byref(call.sample)):
        raise MemoryError(f"a sample of {spec.grid} voxels did not fit the memory")
    return image, target


# --- The call: structures as in samples.h ---


def _pointers(*names: str) -> List[Tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in names]


class _Box(ctypes.Structure):
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("kind", ctypes.c_int),
        ("strides", ctypes.c_int64 * 3),
        ("size", ctypes.c_int * 3),
        ("start", ctypes.c_int * 3),
        ("channels", ctypes.c_int),
        *_pointers("picked", "scale", "shift", "window", "table"),
    )


class _Band(ctypes.Structure):
    _fields_ = (
        ("taps", ctypes.c_int),
        ("size", ctypes.c_int),
        *_pointers("first", "weights"),
    )


class _Sample(ctypes.Structure):
    _fields_ = (
        ("image", _Box),
        ("label", _Box),
        ("grid", ctypes.c_int * 3),
        *_pointers("matrix"),
        ("flips", ctypes.c_int * 3),
        *_pointers("outside", "background", "limits", "noise", "noise_keys"),
        *_pointers("smoothing", "contrast", "gamma"),
        ("is_negative", ctypes.c_int),
        ("is_bfloat16", ctypes.c_int),
        ("has_ignored", ctypes.c_int),
        *_pointers("to_image", "to_target"),
    )


class _Call:
    """A sample as C takes it, with the arrays that its pointers lead to."""

    def __init__(
        self, stored: Stored, drawn: AugmentParams, spec: SampleSpec, image: Array, target: Array
    ):
        self._kept: List[Any] = [stored, image, target]
        picked = np.array(spec.channels, np.int32)
        kind = INT16
        numbers = vars(drawn)
        if drawn.window is None:
            numbers = {**numbers, "background": np.zeros(len(picked), np.float32)}
        else:
            kind = WINDOWED
        scaling = {name: self._pointer(numbers[name]) for name in ("scale", "shift", "window")}
        changes = ("matrix", "outside", "background", "limits", "noise", "noise_keys")
        pointers = {name: self._pointer(numbers[name]) for name in (*changes, "contrast", "gamma")}
        self.sample = _Sample(
            image=_Box(
                kind=kind,
                channels=len(picked),
                picked=self._pointer(picked),
                **scaling,
                **self._box(stored.image, stored.start),
            ),
            label=_Box(
                kind=LABEL,
                channels=spec.table.shape[1],
                table=self._pointer(spec.table),
                **self._box(stored.label, stored.start),
            ),
            grid=(ctypes.c_int * 3)(*spec.grid),
            flips=(ctypes.c_int * 3)(*drawn.flips),
            smoothing=self._smoothing(drawn, spec),
            is_negative=drawn.negative,
            is_bfloat16=spec.is_bfloat16,
            has_ignored=spec.ignore is not None,
            to_image=image.ctypes.data,
            to_target=target.ctypes.data,
            **pointers,
        )

    def _pointer(self, array: Optional[Array]) -> Optional[int]:
        if array is None:
            return None
        array = np.ascontiguousarray(array)
        self._kept.append(array)
        return array.ctypes.data

    def _box(self, array: Array, start: Shape3) -> Dict[str, Any]:
        strides = [step // array.itemsize for step in array.strides[:3]]
        return {
            "values": array.ctypes.data,
            "strides": (ctypes.c_int64 * 3)(*strides),
            "size": (ctypes.c_int * 3)(*array.shape[:3]),
            "start": (ctypes.c_int * 3)(*start),
        }

    def _bands(self, matrices: Sequence[Optional[Array]]) -> Optional[int]:
        """Store bands of the matrices (to, from), of 0 taps for None; nothing if all are None."""
        if all(matrix is None for matrix in matrices):
            return None
        bands = (_Band * len(matrices))()
        for band, matrix in zip(bands, matrices):
            if matrix is not None:
                first, weights = _narrowed(matrix)
                band.taps, band.size = weights.shape
                band.first = self._pointer(first)
                band.weights = self._pointer(weights)
        self._kept.append(bands)
        return ctypes.addressof(bands)

    def _smoothing(self, drawn: AugmentParams, spec: SampleSpec) -> Optional[int]:
        matrices: List[Optional[Array]] = []
        for of_channel in plain.smoothings(drawn, spec.grid):
            # The volume is mirrored already.
            for matrix, is_flipped in zip(of_channel or (None,) * 3, drawn.flips):
                if is_flipped and matrix is not None:
                    matrix = matrix[::-1, ::-1]
                matrices.append(matrix)
        return self._bands(matrices)


def _narrowed(matrix: Array) -> Tuple[Array, Array]:
    """Return where the non-zero weights (to, from) of each row begin, int32 (to,), and the weights
    from there on (taps, to)."""
    used = matrix != 0
    first = used.argmax(1)
    stop = matrix.shape[1] - used[:, ::-1].argmax(1)
    taps = int((stop - first).max())
    first = np.minimum(first, matrix.shape[1] - taps)
    weights = np.take_along_axis(matrix, first[:, None] + np.arange(taps), 1).T
    return first.astype(np.int32), np.ascontiguousarray(weights, np.float32)


# --- The library ---


@functools.cache
def function_in_c() -> Optional[Callable[[Any], int]]:
    """Return `make_sample` of samples.c; None, after a note, if there is none and it cannot be
    built."""
    try:
        lacking = sorted(set(INSTRUCTION_SETS["avx2"].needs) - set(read_host().isa))
        if lacking:
            raise OSError(f"the CPU lacks {', '.join(lacking)}")
        library = build_library(SOURCES, "samples")
    except (OSError, subprocess.CalledProcessError) as error:
        note = f"note: NumPy makes samples, which takes ten times as long or more: {error}"
        print(note, file=sys.stderr)
        return None
    return library.make_sample


if __name__ == "__main__":
    function_in_c()
