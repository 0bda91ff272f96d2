"""Segment an image with an exported network.

python segment.py [--zero-nan] IMAGE.nii.gz [IMAGE.nii.gz ...] LABEL.nii.gz"""

# This text is in USAGE.md, to be saved beside export.json: it needs NumPy, nibabel and a reader of
# the network alone, and SciPy for post-processing.
import itertools
import json
import pathlib
import re
import sys

import nibabel
import numpy as np


def load_network(folder, about):
    """The network in `folder` as a function of its inputs by name; `about` is the content of
    export.json."""
    file = str(folder / about["file"])
    if about["format"] == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        return lambda **inputs: session.run(None, inputs)[0]
    import tensorflow as tf

    model = tf.saved_model.load(file)
    (output,) = about["outputs"]

    def network(**inputs):
        tensors = {name: tf.constant(array) for name, array in inputs.items()}
        return model.signatures["serving_default"](**tensors)[output].numpy()

    return network


def probabilities_of(network, about, image):
    """Probabilities float32 (X, Y, Z, R) of an image float32 (X, Y, Z, C) with axes R A S; 0 where
    nothing is seen."""
    kinds = kinds_of(about)
    numbers = map(numbers_of, np.moveaxis(image, -1, 0), kinds)
    mean, std, around = map(np.float32, zip(*numbers))
    shape = image.shape[:3]
    size = about["size"]
    slides = about["mode"] == "patch"
    low = (0, 0, 0)
    high = shape
    if about["extent"] == "brain":  # the box around all that is not as what surrounds the volume
        is_ct = np.array([each["kind"] == "ct" for each in kinds])
        x, y, z = np.nonzero(np.where(is_ct, image > around, image != around).any(-1))
        if x.size:  # else nothing is, and all of it is seen
            low = [x.min(), y.min(), z.min()]
            high = [x.max() + 1, y.max() + 1, z.max() + 1]
    boxed = [max(b - a, w) for a, b, w in zip(low, high, size)]
    if not slides and boxed != list(size):
        sys.exit(f"the image must fit into {size}, got {boxed}; export with a larger --size")
    inside = []  # the box in the image
    place = []  # of that in what the network sees, which has padding around it
    for a, b, w, n in zip(low, high, boxed, shape):
        if w < n:  # around the middle of what is there, within the image
            start = min(max(a - (w - (b - a)) // 2, 0), n - w)
        else:
            start = -((w - n) // 2)
        first = max(start, 0)
        stop = min(start + w, n)
        inside.append(slice(first, stop))
        place.append(slice(first - start, stop - start))
    inside = tuple(inside)
    place = tuple(place)
    seen = np.zeros((*boxed, image.shape[3]), np.float32) + around
    seen[place] = image[inside]
    statistics = {"mean": mean, "std": std} if "mean" in about["inputs"] else {}
    if slides:

        def logits_of(mirror):
            return blended(network, about, mirror, statistics)
    else:

        def logits_of(mirror):
            return network(image=mirror, **statistics)

    logits = over_mirror_images(logits_of, seen, about["mirrored_axes"])
    probabilities = np.zeros((*shape, logits.shape[-1]), np.float32)
    probabilities[inside] = 0.5 + 0.5 * np.tanh(logits[place] / 2)  # the sigmoid
    return probabilities


def probabilities_at(network, about, image, spacing):
    """The same of an image with this spacing in mm, which the network sees at its own: answers are
    brought back to the image's voxels."""
    answer = probabilities_of(network, about, seen_of(about, image, spacing))
    regions = np.moveaxis(answer, -1, 0)
    return np.stack([resampled(region, image.shape[:3]) for region in regions], -1)


def seen_of(about, image, spacing):
    """An image float32 (X, Y, Z, C) with this spacing in mm as the network sees it, at its own."""
    shape = image.shape[:3]
    wanted = about.get("target_spacing_mm") or spacing
    made = tuple(max(round(n * own / mm), 1) for n, own, mm in zip(shape, spacing, wanted))
    if made == shape:
        return image
    if np.prod(made, dtype=float) > min(2**31, 8 * np.prod(shape, dtype=float)):
        rule = f"the image must have at most 8 times its voxels at {wanted} mm, got {made}"
        sys.exit(f"{rule} from {shape}; take a network of larger voxels")
    mm = [n * own / other for n, own, other in zip(shape, spacing, made)]
    cubic = [not (is_thick(axis, spacing) or is_thick(axis, mm)) for axis in range(3)]
    channels = []
    for volume, kind in zip(np.moveaxis(image, -1, 0), kinds_of(about)):
        values = resampled(volume, made, cubic).clip(volume.min(), volume.max())
        if kind["kind"] == "zscore-foreground":  # 0 is no intensity
            inside = resampled(volume != 0, made) >= 0.5
            values = np.where(inside, values, np.float32(0))
        channels.append(values)
    return np.stack(channels, -1)


def is_thick(axis, spacing):
    """Whether slices along an axis are 3 times as thick as voxels are wide, or more."""
    return spacing[axis] >= 3 * max(np.delete(spacing, axis))


def resampled(volume, shape, cubic=(False, False, False)):
    """A volume (X, Y, Z) as float32 of another shape over the same box, linear or cubic by axis."""
    for axis in range(3):
        if volume.shape[axis] != shape[axis]:
            weights = weights_of(volume.shape[axis], shape[axis], cubic[axis])
            volume = np.moveaxis(np.tensordot(weights, volume, (1, axis)), 0, axis)
    return volume.astype(np.float32)


def weights_of(count, made, cubic):
    """How much each of `count` voxels is part of each of `made`: float32 (made, count)."""
    size = count / made
    wide = max(size, 1.0)
    reach = wide * (1 + cubic)
    centres = ((np.arange(made) + 0.5) * size - 0.5)[:, None]
    places = np.floor(centres - reach) + 1 + np.arange(np.ceil(2 * reach))
    away = np.abs(places - centres) / wide
    parts = np.maximum(1 - away, 0)
    if cubic:  # Catmull-Rom
        near = (1.5 * away - 2.5) * away**2 + 1
        far = ((-0.5 * away + 2.5) * away - 4) * away + 2
        parts = np.where(away < 1, near, np.where(away < 2, far, 0))
    weights = np.zeros((made, count))
    rows = np.arange(made)[:, None]
    np.add.at(weights, (rows, places.astype(int).clip(0, count - 1)), parts)
    return np.float32(weights / weights.sum(1, keepdims=True))


def kinds_of(about):
    """How each channel is normalised; where nothing is said, over its voxels that are not 0."""
    foreground = {"kind": "zscore-foreground"}
    return about.get("normalisation", [foreground] * len(about["channels"]))


def numbers_of(volume, kind):
    """(mean, deviation, what surrounds it) of a channel, by which the network normalises it."""
    if kind["kind"] == "ct":  # of the training's cases
        return kind["mean"], kind["std"], kind["low"]
    if kind["kind"] == "zscore-foreground":
        values = volume[volume != 0].astype(np.float64)
        return (values.mean(), values.std(), 0) if values.size else (0, 1, 0)
    around = middle(border(volume))
    if kind["kind"] == "none":
        return 0, 1, around
    if kind["kind"] == "rescale":
        return volume.min(), volume.max() - volume.min(), around
    values = volume.astype(np.float64)
    return values.mean(), values.std(), around


def over_mirror_images(logits_of, seen, axes):
    """The mean logits of what is seen and of its mirror images along some of the axes, each
    mirrored back."""
    counts = range(len(axes) + 1)
    images = [some for count in counts for some in itertools.combinations(axes, count)]
    total = 0
    for some in images:
        logits = logits_of(np.ascontiguousarray(np.flip(seen, some)))
        total = total + np.flip(logits, some) / np.float32(len(images))
    return total


def blended(network, about, seen, statistics):
    """The logits of windows over what is seen, blended by a bell."""
    bells = []  # along each axis
    starts = []
    for n, w in zip(seen.shape, about["size"]):
        places = np.arange(w) - (w - 1) / 2
        bells.append(np.exp(-0.5 * (places / (w * about["sigma"])) ** 2))
        stride = max(int(w * (1 - about["overlap"])), 1)
        steps = -(-(n - w) // stride)
        starts.append([i * (n - w) // max(steps, 1) for i in range(steps + 1)])
    bell = np.einsum("x,y,z->xyz", *bells).astype(np.float32)[..., None]
    total = np.zeros((*seen.shape[:3], len(about["regions"])), np.float32)
    weight = np.zeros((*seen.shape[:3], 1), np.float32)
    for corner in itertools.product(*starts):
        tile = tuple(slice(start, start + w) for start, w in zip(corner, about["size"]))
        total[tile] += bell * network(image=seen[tile], **statistics)
        weight[tile] += bell
    return total / weight


def painted(probabilities, about):
    """The label uint8 (X, Y, Z); later groups of regions override earlier ones."""
    label = np.zeros(probabilities.shape[:3], np.uint8)
    for group in about["paint"]:
        rivals = probabilities[..., [region["output"] for region in group]]
        codes = np.uint8([region["code"] for region in group])[rivals.argmax(-1)]
        label = np.where(rivals.max(-1) >= about["threshold"], codes, label)
    return label


def listed_channels(path):
    """The channels that a dataset.json above an image's imagesTs, or beside it, names."""
    folder = pathlib.Path(path).absolute().parent
    nearby = (folder, folder.parent)
    above = [place.parent for place in nearby if place.name.lower().startswith("images")]
    for place in (*above, folder):
        if (place / "dataset.json").is_file():
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


def processed(probabilities, about, voxel_mm3):
    """The label as `predict` writes it: with the post-processing of export.json. Voxels measure
    `voxel_mm3`."""
    steps = about["postprocessing"]
    kept = probabilities.copy()
    for cut in steps["cut"]:  # a region is 0 outside of the larger ones that hold it
        for larger in cut["to"]:
            kept[..., cut["output"]][~(probabilities[..., larger] >= about["threshold"])] = 0
    label = painted(kept, about)
    for rule in steps["remove"]:  # components of a region, connected by 26 neighbours
        from scipy import ndimage

        components = ndimage.label(np.isin(label, rule["codes"]), np.ones((3, 3, 3)))[0]
        mm3 = np.bincount(components.ravel())[1:] * float(voxel_mm3)
        answer = probabilities[..., rule["output"]]
        numbers = np.arange(1, len(mm3) + 1)
        sure = np.asarray(ndimage.maximum(answer, components, numbers), float)
        goes = np.ones(len(mm3), bool)
        for bound in rule["below"]:
            goes &= removed(bound, mm3, sure)
        label[np.concatenate([[False], goes])[components]] = rule["becomes"]
    return label


def removed(bound, mm3, sure):
    """Which components of a region a bound removes; they have these volumes and largest
    probabilities."""
    largest = mm3.max(initial=0)
    goes = mm3 < max(bound["mm3"], bound["share"] * largest) * (1 - 1e-9)
    if bound["stays_from"] is not None:
        goes &= sure < bound["stays_from"]
    if mm3[~goes].sum() < bound["region_mm3"] * (1 - 1e-9):  # what is left of the region
        goes[:] = True
    return goes


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
    files = [nibabel.load(path) for path in paths]
    check_grids(paths, files)
    channels = []
    for file in map(nibabel.as_closest_canonical, files):
        volume = file.get_fdata(dtype=np.float32)
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
        is_above = np.median(values[values >= min(low, most)]) > high
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


def main(folder, *words):
    """Segment the images of all words but the last, and write the label of the last; --zero-nan
    among them makes NaN and infinite voxels background."""
    paths = [word for word in words if word != "--zero-nan"]
    about = json.loads((folder / "export.json").read_text(encoding="utf-8-sig"))
    image, file = read_image(paths[:-1])
    image = cleaned(in_order(image, paths[:-1], about), about, "--zero-nan" in words)
    for note in [*notes_on(file, about), *notes_on_windows(image, about)]:
        print(f"note: {note}", file=sys.stderr)
    network = load_network(folder, about)
    probabilities = probabilities_at(network, about, image, spacing_of(file))
    save_label(paths[-1], processed(probabilities, about, voxel_mm3_of(file)), file)


if __name__ == "__main__":
    main(pathlib.Path(__file__).resolve().parent, *sys.argv[1:])
