"""NIfTI files: read with their checksum checked, turned to axes R A S and back, written on a grid.

Lengths are in mm here and everywhere else, whatever the unit of a header; it is written back.

nibabel parses headers and knows orientations. The bytes are read here, because nibabel stops at the
last voxel and never checks gzip's CRC behind it: a flipped bit then gives wrong voxels without an
error."""

import dataclasses
import gzip
import io
import itertools
import math
import zlib
from pathlib import Path
from typing import Any, Sequence, Tuple, TypeVar, Union

import numpy as np
from nibabel import orientations
from nibabel.loadsave import load
from nibabel.nifti1 import Nifti1Header
from nibabel.nifti2 import Nifti2Header

from cpu3d.data.manifest import AffineRow, Geometry, Unit
from cpu3d.data.region import Array, xyz
from cpu3d.errors import InputError
from cpu3d.util.atomic import write_bytes
from cpu3d.util.records import count
from memory_estimator.common.files import read_regular
from models.strides import LEAST_MM, MOST_MM

T = TypeVar("T")
Header = Any  # nibabel's Nifti1Header or Nifti2Header
NIFTI_2 = (b"\x1c\x02\0\0", b"\0\0\x02\x1c")  # the size of its header, in both byte orders
HEADER_SIZES = (b"\x5c\x01\0\0", b"\0\0\x01\x5c", *NIFTI_2)
GZIP = b"\x1f\x8b"  # how its data begin

# The spatial units of xyzt_units, by their codes in the header, and how many of each are a mm. A
# code of 0, and those that the format leaves open, are taken as mm.
UNITS: Tuple[Unit, ...] = ("unknown", "meter", "mm", "micron")
PER_MM = {"unknown": 1.0, "meter": 0.001, "mm": 1.0, "micron": 1000.0}
# A gantry is tilted by 30 degrees at most. Beyond 45 a sheared axis is nearer to another direction
# than to its own, so that R, A and S mean nothing.
MOST_SHEAR_DEG = 45.0
SHEAR_DEG = 0.01  # up to here axes count as perpendicular: headers round their numbers
# Most by which the square of a unit quaternion's length may be above 1, as of one written with six
# digits. nibabel refuses that, also in what we write: such a quaternion is written anew.
QUATERNION_TOLERANCE = 1e-5

MOST_APART = 0.25  # voxels between the corners of grids that are one; less than a neighbour's share

# Header fields whose numbers follow pixdim[0:4] in `Geometry.forms`.
_FORMS = (
    "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z",
    "srow_x", "srow_y", "srow_z",
)  # fmt: skip


def read_volume(path: Union[str, Path]) -> Tuple[Array, Geometry]:
    """Read the volume in `path`: `(X, Y, Z)` or `(X, Y, Z, C)` along the file's own axes, and its
    grid. Axes of length 1 behind the third are left out: `(X, Y, Z, 1, C)`, as ITK writes C
    channels, is the latter.

    The array is Fortran-ordered, read-only, in native byte order, of the file's dtype if the header
    has no scaling (slope 0, NaN or 1 with intercept 0), else float64. Raises InputError for a file
    that is missing, damaged or no single NIfTI-1 or -2 file, voxels that are not real numbers,
    other numbers of axes, an affine that is singular or sheared by more than 45 degrees, and voxels
    below 0.01 or above 100 mm.
    """
    path = Path(path)
    content = _read_bytes(path)
    header, shape, dtype = _read_header(path, content)
    offset = int(header.get_data_offset())
    needed = offset + math.prod(shape) * dtype.itemsize
    if len(content) < needed:
        rule = f"{path} must hold {needed} bytes for shape {shape}"
        raise InputError(f"{rule}, got {len(content)}; fetch the file again")
    voxels = np.frombuffer(content, dtype, count=math.prod(shape), offset=offset)
    if not dtype.isnative:
        voxels = voxels.astype(dtype.newbyteorder("="))
    slope, intercept = header.get_slope_inter()
    if (slope, intercept) not in ((None, None), (1, 0)):
        voxels = voxels.astype(np.float64) * slope + intercept
    voxels = voxels.reshape(shape, order="F")
    voxels.flags.writeable = False
    return voxels, _geometry(path, header, xyz(shape[:3]))


def read_grid(path: Path) -> Tuple[Geometry, int]:
    """Read the grid of a file and count its channels: by its header alone, if that is sound. Raises
    InputError as `read_volume`."""
    try:
        image: Any = load(path)
        shape = _axes(image.shape)
        geometry = _geometry(path, image.header, xyz(shape[:3]))
        is_volume = len(shape) <= 4 and image.get_data_dtype().kind in "iuf"
    # nibabel raises its own errors, zlib's, numpy's and OSError for bytes that are no image.
    except Exception:
        is_volume = False
    if not is_volume:
        voxels, geometry = read_volume(path)
        shape = voxels.shape
    return geometry, math.prod(shape[3:])


def to_ras(array: Array, geometry: Geometry) -> Array:
    """Turn `array`, on the grid of `geometry`, to axes R A S by flips and transposes of the first
    three. A view."""
    return orientations.apply_orientation(array, orientations.axcodes2ornt(geometry.axes))


def from_ras(array: Array, geometry: Geometry) -> Array:
    """Turn `array` from axes R A S back to the grid of `geometry`: the exact inverse of `to_ras`.
    A view."""
    wanted = ras_shape(geometry)
    if tuple(array.shape[:3]) != wanted:
        rule = f"array must have shape {wanted} in axes R A S"
        raise ValueError(f"{rule}, got {array.shape}; use `to_ras`")
    ras = orientations.axcodes2ornt("RAS")
    own = orientations.axcodes2ornt(geometry.axes)
    return orientations.apply_orientation(array, orientations.ornt_transform(ras, own))


def ras_to_file(geometry: Geometry) -> Array:
    """Return the 4 x 4 matrix from a voxel in axes R A S to that of the file."""
    return orientations.inv_ornt_aff(orientations.axcodes2ornt(geometry.axes), geometry.shape)


def is_voxel_size(lengths_mm: Sequence[float]) -> bool:
    """Tell whether voxels may be of this size, so that their unit is likely to be right."""
    return min(lengths_mm) >= LEAST_MM * (1 - 1e-6) and max(lengths_mm) <= MOST_MM * (1 + 1e-6)


def is_placed(geometry: Geometry) -> bool:
    """Tell whether the file gives the patient's orientation. With sform and qform codes of 0 the
    axes are those of the Analyze format, as nibabel and FSL read it: the first to the left, the
    second to anterior, the third up."""
    return bool(geometry.sform_code or geometry.qform_code)


def orientation_note(geometry: Geometry) -> str:
    """Say that a file gives no orientation, or two that contradict each other; "" for others."""
    if is_placed(geometry):
        return contradiction(geometry)
    rule = "no orientation in the file (its sform and qform codes are 0)"
    side = "its first axis is taken to run to the left, as nibabel and FSL do"
    return f"{rule}: {side}; R, L, A, P, S, I are guesses, and left and right may be exchanged"


def contradiction(geometry: Geometry) -> str:
    """Say that the sform and the qform of a file contradict each other; "" for others."""
    if not (geometry.sform_code and geometry.qform_code):
        return ""
    try:
        qform = _placed_header(geometry).get_qform()
    except Exception:  # nibabel's, for a quaternion that is none beside a sform
        return ""
    qform[:3] /= PER_MM[geometry.unit]
    apart = displacement(qform, np.array(geometry.affine), geometry.shape)
    if apart <= MOST_APART:
        return ""
    axes = "".join(orientations.aff2axcodes(qform))
    forms_named = f"the sform (axes {geometry.axes}) and the qform (axes {axes})"
    rule = f"{forms_named} contradict each other, by {apart:.3g} voxels at a corner"
    return f"{rule}: the sform is taken; make both the right one"


def displacement(affine: Array, other: Array, shape: Sequence[int]) -> float:
    """Return how many voxels apart two affines put a corner of a grid, at the corner where that is
    most."""
    ends = [(-0.5, count - 0.5) for count in shape]
    corners = np.array(list(itertools.product(*ends, (1.0,)))).T
    apart = np.linalg.solve(np.asarray(other), np.asarray(affine) @ corners) - corners
    return float(np.linalg.norm(apart, axis=0).max())


def on_grid(array: Array, path: Path, grid: Geometry, first: Path, wanted: Geometry) -> Array:
    """Turn an array from `path` to the axes of the grid `wanted`, which is that of `first`, by
    flips and transposes: a view. Raises InputError if it is of another place in space."""
    affine = np.array(grid.affine)
    target = np.array(wanted.affine)
    if grid.shape == wanted.shape and displacement(affine, target, grid.shape) <= MOST_APART:
        return array
    rule = f"{path} must have the grid of {first.name}"
    if is_placed(grid) != is_placed(wanted):
        # That the same voxels are meant is likely, but a side that is guessed wrong is not seen
        # later.
        lacking = first.name if is_placed(grid) else path.name
        got = f"no orientation in {lacking}, whose sform and qform codes are 0"
        todo = "copy the other's header to it if their voxels are in the same order"
        raise InputError(f"{rule}, got {got}; {todo}")
    for name, own in ((path.name, grid), (first.name, wanted)):
        if contradiction(own):  # by the other form it may need no turn, and a side is exchanged
            raise InputError(f"{rule}, got {name}, in which {contradiction(own)}")
    turn = orientations.io_orientation(np.linalg.solve(target, affine))
    affine = affine @ orientations.inv_ornt_aff(turn, grid.shape)
    shape = tuple(grid.shape[axis] for axis in np.argsort(turn[:, 0]))
    apart = displacement(affine, target, shape)
    if shape != wanted.shape:
        got = f"shape {shape}, not {wanted.shape}"
    elif apart > MOST_APART:
        got = f"a corner {apart:.3g} voxels from its place, more than {MOST_APART}"
    else:
        return orientations.apply_orientation(array, turn)
    raise InputError(f"{rule}, got {got}; resample it, or leave the case out")


def ras_shape(geometry: Geometry) -> Tuple[int, int, int]:
    """Voxels along R, A, S."""
    return _in_ras_order(geometry, geometry.shape)


def ras_spacing_mm(geometry: Geometry) -> Tuple[float, float, float]:
    """Distance between neighbouring voxels along R, A, S in mm."""
    lengths = np.linalg.norm(np.asarray(geometry.affine, np.float64)[:3, :3], axis=0)
    return _in_ras_order(geometry, lengths.tolist())


def ras_steps_mm(geometry: Geometry) -> Array:
    """The steps from a voxel to the next along R, A, S: the columns of a matrix (3, 3), in mm.

    It is upper triangular, in a frame turned so that R is its first axis: the product of its
    diagonal is a voxel's volume, and the distance of two voxels the length of matrix @ difference.
    Diagonal, unless the grid is sheared.
    """
    steps = (np.asarray(geometry.affine, np.float64) @ ras_to_file(geometry))[:3, :3]
    if _shear_deg(steps) <= SHEAR_DEG:
        return np.diag(ras_spacing_mm(geometry))
    triangular = np.linalg.qr(steps)[1]
    return triangular * np.sign(np.diagonal(triangular))[:, None]


def write_volume(
    path: Union[str, Path], volume_ras: Array, geometry: Geometry, *, compression: int = 6
) -> None:
    """Write `(X, Y, Z)` or `(X, Y, Z, C)` in axes R A S, in its own dtype, on the grid of
    `geometry`, with its sform and qform, atomically.

    The same input gives the same bytes. `compression` is gzip's level. Raises InputError for
    another ending than .nii.gz or .nii."""
    write_bytes(path, volume_content(path, volume_ras, geometry, compression))


def volume_content(
    path: Union[str, Path], volume_ras: Array, geometry: Geometry, compression: int = 6
) -> bytes:
    """Return the content of the file that `write_volume` writes."""
    name = Path(path).name.lower()
    if not name.endswith((".nii.gz", ".nii")):
        rule = "file to write must end in .nii.gz or .nii"
        raise InputError(f"{rule}, got {path}; choose such a name")
    voxels = from_ras(volume_ras, geometry)
    header = _placed_header(geometry)
    header.set_data_shape(voxels.shape)
    header.set_data_dtype(voxels.dtype.newbyteorder("<"))
    header.set_xyzt_units(geometry.unit)
    header["magic"] = b"n+1"
    header["vox_offset"] = 352
    header["scl_slope"] = 1
    header["scl_inter"] = 0
    no_extension = b"\0\0\0\0"
    content = header.binaryblock + no_extension + voxels.tobytes(order="F")
    if name.endswith(".gz"):
        packer = zlib.compressobj(compression, wbits=31)  # 31: gzip framing, with a zero time stamp
        content = packer.compress(content) + packer.flush()
    return content


def _read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked if it is gzip data, whose CRC and length are checked.
    Raises InputError for a file that cannot be read, is cut or damaged, or holds something else."""
    try:
        content = read_regular(path)
        if content.startswith(GZIP):
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        rule = f"{path} must be whole gzip data"
        raise InputError(f"{rule}, got {error}; it is cut or damaged, fetch it again") from None
    except OSError as error:
        rule = f"{path} must be a file that can be read"
        raise InputError(f"{rule}, got {error.strerror}; check the path") from None
    if content[:4] not in HEADER_SIZES:
        got = f"{count(len(content), 'byte')}, which begin with {content[:40]!r}"
        raise InputError(f"{path} must be a NIfTI file, got {got}; fetch it again, or convert it")
    return content


def _read_header(path: Path, content: bytes) -> Tuple[Header, Tuple[int, ...], "np.dtype[Any]"]:
    """Return the NIfTI-1 or -2 header, checked, and the shape and dtype of the voxels behind it."""
    kind = Nifti1Header
    if content[:4] in NIFTI_2:
        kind = Nifti2Header
    try:
        header = kind.from_fileobj(io.BytesIO(content), check=True)
        shape = _axes(header.get_data_shape())
        dtype = header.get_data_dtype()
        offset = int(header.get_data_offset())
        header.get_slope_inter()
    except Exception as error:  # nibabel's own, numpy's and struct's, for bytes that are no header
        rule = f"{path} must be a NIfTI file"
        raise InputError(f"{rule}, got {error!r}; convert it to .nii.gz") from None
    magic = bytes(header["magic"])[:3]
    is_shape = len(shape) in (3, 4) and min(shape) > 0
    for rule, got, holds in (
        ("hold header and voxels in one file", f"magic {magic!r}", magic in (b"n+1", b"n+2")),
        ("have 3 axes, or 4 with the channels last", f"shape {shape}", is_shape),
        ("hold real numbers", str(dtype), dtype.kind in "iuf"),
        ("have its voxels after its header", f"offset {offset}", offset >= header.sizeof_hdr),
    ):
        if not holds:
            raise InputError(f"{path} must {rule}, got {got}; convert it to .nii.gz")
    return header, shape, dtype


def _axes(shape: Sequence[int]) -> Tuple[int, ...]:
    """A file's shape without the axes of length 1 behind the third."""
    return tuple(int(n) for axis, n in enumerate(shape) if axis < 3 or n != 1)


def _geometry(path: Path, header: Header, shape: Tuple[int, int, int]) -> Geometry:
    header.quaternion_threshold = -QUATERNION_TOLERANCE
    code = int(header["xyzt_units"]) & 7  # the other bits are of time
    unit: Unit = UNITS[code] if code < len(UNITS) else "unknown"
    try:
        affine = np.array(header.get_best_affine(), np.float64)
    except Exception as error:  # as in `_parse_header`
        rule = f"{path} must have a valid qform"
        raise InputError(f"{rule}, got {error}; correct its header") from None
    affine[:3] /= PER_MM[unit]
    _check_affine(path, affine, unit)
    geometry = Geometry(
        shape,
        affine_rows(affine),
        "".join(orientations.aff2axcodes(affine)),
        sform_code=int(header["sform_code"]),
        qform_code=int(header["qform_code"]),
        unit=unit,
    )
    forms = _forms(header)
    quaternion = np.array(forms[4:7])
    is_kept = np.isfinite(forms).all()  # not, with the NaN of a form that is not used
    is_kept &= quaternion @ quaternion <= 1 - Nifti1Header.quaternion_threshold
    if is_kept and forms != _forms(_placed_header(geometry)):
        return dataclasses.replace(geometry, forms=forms)
    return geometry


def affine_rows(affine: Array) -> Tuple[AffineRow, AffineRow, AffineRow, AffineRow]:
    """A 4 x 4 matrix as `Geometry.affine`."""
    first, second, third, last = (tuple(row) for row in affine.tolist())
    return first, second, third, last


def _check_affine(path: Path, affine: Array, unit: str) -> None:
    """Raise InputError as `read_volume` for the affine, in mm, of a file in this unit."""
    steps = affine[:3, :3]
    lengths = np.linalg.norm(steps, axis=0)
    is_finite = np.isfinite(affine).all()
    if not is_finite or abs(np.linalg.det(steps)) <= 1e-6 * np.prod(lengths):
        rule = f"{path} must have an invertible affine"
        raise InputError(f"{rule}, got {affine.tolist()}; correct its header")
    if not is_voxel_size(lengths):
        got = " x ".join(f"{n:.4g}" for n in lengths)
        rule = f"{path} must have voxels of {LEAST_MM:g} to {MOST_MM:g} mm"
        todo = f"correct xyzt_units in its header, {unit}"
        raise InputError(f"{rule}, got {got}; {todo}")
    shear = _shear_deg(steps)
    if shear > MOST_SHEAR_DEG:
        rule = f"{path} must have axes that are sheared by at most {MOST_SHEAR_DEG:g} degrees"
        raise InputError(f"{rule}, got {shear:.1f}; resample it")


def _shear_deg(steps: Array) -> float:
    """The most by which two columns of (3, 3) are not perpendicular, in degrees."""
    directions = steps / np.linalg.norm(steps, axis=0)
    cosines = np.abs(directions.T @ directions)[np.triu_indices(3, 1)]
    return math.degrees(math.asin(min(float(cosines.max()), 1.0)))


def _in_ras_order(geometry: Geometry, values: Sequence[T]) -> Tuple[T, T, T]:
    """Values along the source's axes in the order R, A, S."""
    order = np.argsort(orientations.axcodes2ornt(geometry.axes)[:, 0])
    return xyz(values[axis] for axis in order)


def _forms(header: Header) -> Tuple[float, ...]:
    """The numbers of `Geometry.forms`, in the float32 of NIfTI-1."""
    numbers = [header["pixdim"][:4], *(np.ravel(header[name]) for name in _FORMS)]
    with np.errstate(all="ignore"):  # beyond float32 is infinite, which the caller looks for
        return tuple(np.concatenate(numbers).astype(np.float32).tolist())


def _placed_header(geometry: Geometry) -> Header:
    """A little-endian NIfTI-1 header with the sform and qform of a grid, in its source's unit."""
    header = Nifti1Header(endianness="<")
    affine = np.array(geometry.affine, np.float64)
    affine[:3] *= PER_MM[geometry.unit]
    header.set_qform(affine, geometry.qform_code)
    header.set_sform(affine, geometry.sform_code)
    if geometry.forms:
        header["pixdim"][:4] = geometry.forms[:4]
        scalars = geometry.forms[4:10]
        rows = np.reshape(geometry.forms[10:], (3, 4))
        for name, value in zip(_FORMS, (*scalars, *rows)):
            header[name] = value
    return header
