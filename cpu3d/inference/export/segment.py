"""Segment an image with an exported network.

python segment.py [--zero-nan] IMAGE.nii.gz [IMAGE.nii.gz ...] LABEL.nii.gz"""

# It is saved beside export.json, and needs NumPy, nibabel and a reader of the network alone, and
# SciPy for post-processing.
import itertools
import json
import pathlib
import sys

import numpy as np

from cpu3d.inference.export.image import (
    border,
    cleaned,
    in_order,
    kinds_of,
    middle,
    notes_on,
    notes_on_windows,
    read,
    read_image,
    save_label,
    spacing_of,
    voxel_mm3_of,
)


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


def processed(probabilities, about, voxel_mm3):
    """The label as `predict` writes it: with the post-processing of export.json. Voxels measure
    `voxel_mm3`."""
    steps = about["postprocessing"]
    label = painted(probabilities, about)
    for rule in steps["remove"]:  # components of a region, connected by 26 neighbours
        from scipy import ndimage

        components = ndimage.label(np.isin(label, rule["codes"]), np.ones((3, 3, 3)))[0]
        mm3 = np.bincount(components.ravel())[1:] * float(voxel_mm3)
        answer = probabilities[..., rule["output"]]
        numbers = np.arange(1, len(mm3) + 1)
        sure = np.asarray(ndimage.maximum(answer, components, numbers), float)
        goes = removed(rule["below"], mm3, sure)
        label[np.concatenate([[False], goes])[components]] = rule["becomes"]
    return label


def removed(bound, mm3, sure):
    """Which components of a region a bound removes; they have these volumes and largest
    probabilities."""
    goes = mm3 < bound["share"] * mm3.max(initial=0) * (1 - 1e-9)
    if bound["stays_from"] is not None:
        goes &= sure < bound["stays_from"]
    if mm3[~goes].sum() < bound["region_mm3"] * (1 - 1e-9):  # what is left of the region
        goes[:] = True
    return goes


def main(folder, *words):
    """Segment the images of all words but the last, and write the label of the last; --zero-nan
    among them makes NaN and infinite voxels background."""
    paths = [word for word in words if word != "--zero-nan"]
    with read(folder / "export.json", "JSON"):
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
