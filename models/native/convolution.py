"""Own convolutions of 3 x 3 x 3, stride 1, "same" padding, norm and ReLU formed on load: forward and both gradients.

Maps are (batch, x, y, z, channels), float32 or bfloat16, channels a multiple of 4; filters (3, 3, 3, in, out), float32.
Norms are given a channel of each sample: tensors of shape (batch, channels), float32. Products of bfloat16 maps are of
bfloat16 values where the CPU multiplies those, sums always float32. Equal inputs and threads give equal bits.
TF_NUM_INTRAOP_THREADS threads take part, by default one for each CPU that the process may use. CPU3D_INSTRUCTION_SET
(avx2, avx512, avx512_bf16) takes other kernels than the fastest.
"""

import ctypes
import functools
from typing import Any, NamedTuple, Optional, Sequence, Tuple, Union

from models.native.build import door_library

Tensor = Any
Maps = Union[Tensor, Sequence[Tensor]]


class NormGradient(NamedTuple):
    """The gradient g after a norm and ReLU stands for a * (g where scale * raw + shift > 0, else 0) + b * raw + c."""

    raw: Tensor  # the map that was normalised, of the gradient's shape
    scale: Tensor
    shift: Tensor
    a: Tensor
    b: Tensor
    c: Tensor


class NormBelow(NamedTuple):
    """The norm and ReLU before the convolution, of which its gradient needs two sums."""

    raw: Tensor
    scale: Tensor
    shift: Tensor
    mean: Tensor
    rstd: Tensor  # 1 / standard deviation


def available() -> bool:
    """Whether the operations are built, for this TensorFlow and CPU."""
    return _loaded() is not None


def convolve(
    maps: Maps, filters: Tensor, scale: Optional[Tensor] = None, shift: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor, Tensor]:
    """The raw sum, (batch, x, y, z, out), and its mean and variance over the grid, each (batch, out).

    Two maps count as concatenated. With scale and shift, (batch, in), max(scale * map + shift, 0) is convolved.
    Raises RuntimeError where `available` is false, and InvalidArgumentError for shapes that do not fit.
    """
    import tensorflow as tf

    raw, sums = _operations().cpu_convolve(
        filters=filters,
        coefficients=_norm_coefficients(tf, scale, shift),
        below_coefficients=_none(tf),
        maps=_listed(maps),
        above=[],
        add=[],
        below=[],
    )
    return raw, sums[:, 0], sums[:, 1]


def input_gradient(
    gradient: Tensor,
    filters: Tensor,
    norm: Optional[NormGradient] = None,
    add: Optional[Tensor] = None,
    below: Optional[NormBelow] = None,
) -> Tuple[Tensor, Tensor, Tensor]:
    """The gradient with respect to what was convolved, (batch, x, y, z, in), and two sums, each (batch, in).

    `gradient`, (batch, x, y, z, out), stands for itself or, with `norm`, for the gradient before that norm. `add` is a
    map that is added to the result. With `below` and n = scale * raw + shift, the sums are of the result g where n > 0,
    and of g * (raw - mean) * rstd there; else 0. For two concatenated maps call it with each one's part of the filters.
    Raises as `convolve`.
    """
    import tensorflow as tf

    g, sums = _operations().cpu_input_gradient(
        filters=filters,
        coefficients=tf.stack(norm[1:], 1) if norm else _none(tf),
        below_coefficients=tf.stack(below[1:], 1) if below else _none(tf),
        maps=[gradient],
        above=[norm.raw] if norm else [],
        add=[] if add is None else [add],
        below=[below.raw] if below else [],
    )
    return g, sums[:, 0], sums[:, 1]


def filter_gradient(
    maps: Maps,
    gradient: Tensor,
    filters: Tensor,
    scale: Optional[Tensor] = None,
    shift: Optional[Tensor] = None,
    norm: Optional[NormGradient] = None,
) -> Tensor:
    """The gradient with respect to `filters`, of which only the shape is read: (3, 3, 3, in, out), float32.

    `maps`, `scale` and `shift` as in `convolve`, `gradient` and `norm` as in `input_gradient`. Raises as `convolve`.
    """
    import tensorflow as tf

    return _operations().cpu_filter_gradient(
        filters=filters,
        coefficients=_norm_coefficients(tf, scale, shift),
        gradient_coefficients=tf.stack(norm[1:], 1) if norm else _none(tf),
        maps=_listed(maps),
        above=[norm.raw] if norm else [],
        gradient=gradient,
    )


# --- The library ---


@functools.cache
def _loaded() -> Optional[Any]:
    """TensorFlow's module of the operations; None where they are not built or of no use here."""
    path = door_library()
    if path is None:
        return None
    import tensorflow as tf

    try:
        module = tf.load_op_library(str(path))
        kernels = ctypes.CDLL(str(path)).native_kernels
    except (OSError, tf.errors.OpError):
        return None
    kernels.restype = ctypes.c_void_p
    return module if kernels(None, 0) or kernels(None, 1) else None


def _operations() -> Any:
    module = _loaded()
    if module is None:
        raise RuntimeError("own kernels must be built, on a CPU with AVX2: run python -m models.native.build")
    return module


def _listed(maps: Maps) -> Sequence[Tensor]:
    return list(maps) if isinstance(maps, (list, tuple)) else [maps]


def _none(tf: Any) -> Tensor:
    return tf.zeros((0,), tf.float32)


def _norm_coefficients(tf: Any, scale: Optional[Tensor], shift: Optional[Tensor]) -> Tensor:
    """(batch, 5, channels): scale and shift, and three that are not read."""
    return _none(tf) if scale is None else tf.stack([scale, shift, shift, shift, shift], 1)
