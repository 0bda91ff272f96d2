"""The images and the label of the program that segments with an exported network: grids, channels
by name, values, and what to say of them."""

import contextlib
import json
import pathlib
import re
import sys

import nibabel
import numpy as np


def kinds_of(about):
    """How each channel is normalised; where nothing is said, over its voxels that are not 0."""
    foreground = {"kind": "zscore-foreground"}
    return about.get("normalisation", [foreground] * len(about["channels"]))


@contextlib.contextmanager
def read(path, kind):
    """End the program with a line if a file cannot be read: missing, empty, cut or damaged."""
    try:
        yield
    except Exception as error:  # nibabel's own, zlib's, json's and OSError
        got = str(error) or type(error).__name__
        sys.exit(f"{path} must be whole {kind}, got {got}; fetch it again")


def listed_channels(path):
    """The channels that a dataset.json above an image's imagesTs, or beside it, names."""
    folder = pathlib.Path(path).absolute().parent
    nearby = (folder, folder.parent)
    above = [place.parent for place in nearby if place.name.lower().startswith("images")]
    for place in (*above, folder):
        if (place / "dataset.json").is_file():
            with read(place / "dataset.json", "JSON"):
                content = json.loads((place / "dataset.json").read_text(encoding="utf-8-sig"))
            if not isinstance(content, dict):  # of something else
                return []
            names = content.get("channel_names") or content.get("modality") or {}
            return numbered_twins([names[number] for number in sorted(names, key=int)])
    return []


def numbered_twins(names):
    """Names of which some are the same, these with their number among them: MRI (1), MRI (2)."""
    numbered = []
    for place, name in enumerate(names):
        is_twin = names.count(name) > 1
        numbered.append(f"{name} ({names[: place + 1].count(name)})" if is_twin else name)
    return numbered


def channel_of(name, about):
    """The channel that a name means, whatever its case, blanks, - and _; else None."""
    plain = re.sub(r"[\s_-]+", "", name.lower())
    for channel, names in about["channel_names"].items():
        if plain in names:
            return channel
    return None


def word_of(name, about, before):
    """The channel that a word of a file's name means, if it is no number; T1 is with contrast if it
    says so `before`, as in x_ce-gd_T1w."""
    if re.fullmatch(r"[\s_\d-]*", name):
        return None
    agent = r"(^|[\s_.-])(ce-[^\W_]+(?=_|$)|(ce|gd|gad|contrast)$)"
    has_agent = re.search(agent, before.rstrip(" _.-"), re.IGNORECASE)
    channel = channel_of(name, about)
    if channel == channel_of("t1", about) and has_agent:
        return channel_of("t1gd", about)
    return channel


def stem_of(path):
    return re.sub(r"\.nii(\.gz)?$", "", pathlib.Path(path).name, flags=re.IGNORECASE)


def channel_at_end(path, about, is_alone):
    """The channel that a 3D file's name ends in, or its number as in _0002; else None. That of a
    file alone is of a patient, unless it is 0000 or a list has several channels."""
    stem = stem_of(path)
    listed = listed_channels(path)
    number = re.search(r"_(\d{4})$", stem)
    if number and listed:
        if int(number[1]) < len(listed):
            return channel_of(listed[int(number[1])], about)
        return None
    if number and (not is_alone or number[1] == "0000"):
        return channel_of(number[1], about)
    starts = [0, *(mark.end() for mark in re.finditer(r"[\s_.-]", stem))]
    for start in starts:
        channel = word_of(stem[start:], about, stem[:start])
        if channel:
            return channel
    return None


def channel_within(path, about):
    """The only channel that a word, or two in a row, of a 3D file's name tell; else None."""
    stem = stem_of(path)
    channels = []
    start = 0
    words = re.split(r"[\s_.-]", stem)
    while words:
        length = 2 if word_of("".join(words[:2]), about, "") else 1
        taken = words[:length]
        words = words[length:]
        channels.append(word_of("".join(taken), about, stem[:start]))
        start += sum(len(word) + 1 for word in taken)
    channels = [channel for channel in channels if channel]
    return channels[0] if len(channels) == 1 else None


def channels_of_files(paths, about):
    """The channels that 3D files' names tell: their ends, or if no end is one, words within."""
    names = [channel_at_end(path, about, len(paths) == 1) for path in paths]
    within = [channel_within(path, about) for path in paths]
    if any(names) or None in within or len(set(within)) < 2:
        return names
    return within


def in_order(image, paths, about):
    """The network's channels of `image` (X, Y, Z, C): by name, or as given if no name tells."""
    wanted = about["channels"]
    listed = listed_channels(paths[0])
    if len(paths) == 1 and (image.shape[3] > 1 or len(listed) == 1):
        names = [channel_of(name, about) for name in listed]
    else:
        names = channels_of_files(paths, about)
        listed = []
    if not any(names) and not listed:
        names = wanted
    if len(names) != image.shape[3] or any(names.count(name) != 1 for name in wanted):
        got = ", ".join(listed or [pathlib.Path(path).name for path in paths])
        rule = f"the image must have each of {', '.join(wanted)} once, by name or in this order"
        sys.exit(f"{rule}, got {got}; give these, or name them so")
    return image[..., [names.index(name) for name in wanted]]


def unit_mm(file):
    """The length unit of a file's header in mm: metres, micrometres, else it is mm."""
    return {1: 1000.0, 3: 0.001}.get(int(file.header["xyzt_units"]) & 7, 1.0)


def voxel_mm3_of(file):
    """The volume of a voxel of a NIfTI file in mm3."""
    return abs(np.linalg.det(file.affine[:3, :3])) * unit_mm(file) ** 3


def without_residue(volume):
    """A channel with exact 0 for what interpolation has left around a head, by the rule of
    `predict`."""
    size = np.abs(volume)
    largest = np.percentile(size, 99.9)
    tiny = size <= 1e-4 * largest
    near = size <= 1e-2 * largest
    few = np.count_nonzero(volume[tiny]) <= 0.01 * np.count_nonzero(tiny)
    apart = np.count_nonzero(tiny) >= 0.5 * np.count_nonzero(near)
    around = apart or border(tiny).mean() >= 0.5
    if few or not around or np.array_equal(np.rint(volume), volume):
        return volume
    from scipy import ndimage

    components = ndimage.label(near)[0]
    is_outside = np.zeros(components.max() + 1, bool)  # by number
    is_outside[border(components)] = True
    is_outside[0] = False
    outside = is_outside[components]
    beside = volume[outside & ~tiny]
    swings = np.count_nonzero(beside < 0) >= 0.2 * max(beside.size, 1)
    return np.where(tiny | (outside & swings), np.float32(0), volume)


def middle(values):
    """The median, or the lower of two; 0 of none."""
    return np.sort(values)[(values.size - 1) // 2] if values.size else 0


def border(volume):
    """The voxels of the six faces."""
    sides = [np.moveaxis(volume, axis, 0) for axis in range(3)]
    return np.concatenate([side[end].ravel() for side in sides for end in (0, -1)])


def check_grids(paths, files):
    """Stop at files that `predict` refuses: on several grids, of voxels beyond all scanners' in the
    header's unit, or sheared by more than 45 degrees."""
    first = files[0]
    unit = unit_mm(files[0])
    for path, file in zip(paths, files):
        steps = file.affine[:3, :3] * unit_mm(file)
        lengths = np.linalg.norm(steps, axis=0)
        if sum(n > 1 for n in file.shape[3:]) > 1:
            rule = f"{path} must be 3D, or 4D with the channels last, got shape {file.shape}"
            sys.exit(f"{rule}; write each channel into a 3D file")
        apart = np.abs(file.affine[:3] * unit_mm(file) - first.affine[:3] * unit).max()
        if file.shape[:3] != first.shape[:3] or apart > 1e-3:
            rule = f"{path} must have the grid of {paths[0]}, got another"
            sys.exit(f"{rule}; resample it or correct its header")
        if lengths.min() < 0.01 * (1 - 1e-6) or lengths.max() > 100 * (1 + 1e-6):
            sys.exit(f"{path} must have voxels of 0.01 to 100 mm, got {lengths}; correct its unit")
        directions = steps / lengths
        cosine = np.triu(np.abs(directions.T @ directions), 1).max()
        shear = np.degrees(np.arcsin(min(cosine, 1)))
        if shear > 45:
            rule = f"{path} must have axes sheared by at most 45 degrees, got {shear:.0f}"
            sys.exit(f"{rule}; resample it")


def read_image(paths):
    """The image float32 (X, Y, Z, C) in axes R A S as it is in its files, and the first of them."""
    nibabel.Nifti1Header.quaternion_threshold = 1e-5  # for quaternions of length 1 but for rounding
    nibabel.Nifti2Header.quaternion_threshold = 1e-5
    files = []
    for path in paths:
        with read(path, "NIfTI"):
            files.append(nibabel.load(path))
    check_grids(paths, files)
    channels = []
    for path, file in zip(paths, files):
        with read(path, "NIfTI"):
            volume = nibabel.as_closest_canonical(file).get_fdata(dtype=np.float32)
        channels += list(np.moveaxis(volume.reshape(*volume.shape[:3], -1), -1, 0))
    return np.stack(channels, -1), files[0]


def spacing_of(file):
    """The voxels of a file along R, A, S in mm."""
    canonical = nibabel.as_closest_canonical(file)
    return [float(n) * unit_mm(file) for n in nibabel.affines.voxel_sizes(canonical.affine)]


def cleaned(image, about, zero_nan=False):
    """The network's channels without what splines have left around a head, and, with `zero_nan`,
    without NaN and infinity."""
    channels = []
    for volume, name, kind in zip(np.moveaxis(image, -1, 0), about["channels"], kinds_of(about)):
        is_finite = np.isfinite(volume)
        bad = np.count_nonzero(~is_finite)
        if bad and not zero_nan:
            rule = f"{name} must be finite, got {bad} NaN or infinite voxels"
            sys.exit(f"{rule}; correct them, or make them background with --zero-nan")
        if kind["kind"] != "zscore-foreground":
            sides = border(volume)
            around = middle(sides[np.isfinite(sides)])
            channels.append(np.where(is_finite, volume, around))
            continue
        channels.append(without_residue(np.where(is_finite, volume, np.float32(0))))
    for volume, name, kind in zip(channels, about["channels"], kinds_of(about)):
        is_air = (volume > -1100) & (volume < -900)
        if name in about.get("not_ct", ()) and is_air.mean() >= 0.05:
            rule = f"{name} must not be CT, got large parts at the value of air, -1000 HU"
            sys.exit(f"{rule}; give the image of that channel")
        inside = volume[volume != 0] if kind["kind"] == "zscore-foreground" else volume
        if not inside.size or inside.min() == inside.max():
            sys.exit(f"{name} must vary, got one value; fetch the image again")
    return np.stack(channels, -1).astype(np.float32)


def notes_on_windows(image, about):
    """What to say of CT whose values are not those that the training's window is of."""
    for volume, name, kind in zip(np.moveaxis(image, -1, 0), about["channels"], kinds_of(about)):
        if "low" not in kind:
            continue
        low = kind["low"]
        high = kind["high"]
        values = volume.ravel()[:: max(volume.size // 10**6, 1)]
        least, most = np.percentile(values, (0.5, 99.5))
        median = np.median(values[values >= min(low, most)])
        # Muscle, at about 50 HU, is above a window of fat, of lungs or of airways, too.
        is_above = median > max(high, 0) + 512  # half of what is between HU and HU + 1024
        if low + 0.05 * (high - low) < least or most < low or is_above:
            got = f"values of {name} from {least:.4g} to {most:.4g} (0.5th to 99.5th percentile)"
            window = f"the training's window from {low:.4g} to {high:.4g}"
            yield f"{got} do not fit {window}: they may be in another unit, as HU + 1024"


def is_placed(file):
    """Whether a file gives the patient's orientation."""
    return bool(file.header["sform_code"] or file.header["qform_code"])


def notes_on(file, about):
    """What to say of an image whose sides or voxels are not as the training's."""
    if not is_placed(file):
        taken = "its first axis is taken to run to the left; left and right may be exchanged"
        yield f"no orientation in the file (its sform and qform codes are 0): {taken}"
    elif about.get("trained_with_orientation") is False:
        rule = "an image with orientation, but the network was trained on images without"
        yield f"{rule}: left and right may be exchanged in the answer"
    spacing = spacing_of(file)
    trained = about.get("trained_spacing_mm")
    if about.get("target_spacing_mm"):  # images are resampled
        trained = None
    if trained and any(abs(got - n) > 0.1 * n * (1 + 1e-6) for got, n in zip(spacing, trained)):
        own, usual = (" x ".join(f"{n:.3g}" for n in sizes) for sizes in (spacing, trained))
        rule = f"voxels of {own} mm, but the network was trained on {usual} mm"
        yield f"{rule}; resample the image to the latter"


def save_label(path, label, file):
    """Write a label in axes R A S, with the file's place and unit. Without a place it has the
    file's own axes."""
    affine = nibabel.as_closest_canonical(file).affine
    if not is_placed(file):
        ras = [[0, 1], [1, 1], [2, 1]]
        own = nibabel.io_orientation(file.affine)
        turn = nibabel.orientations.ornt_transform(ras, own)
        label = nibabel.apply_orientation(label, turn)
        affine = None
    answer = nibabel.Nifti1Image(label, affine)
    answer.header.set_zooms(nibabel.affines.voxel_sizes(file.affine if affine is None else affine))
    answer.header["xyzt_units"] = file.header["xyzt_units"]
    nibabel.save(answer, path)
