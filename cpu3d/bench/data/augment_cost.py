"""What augmentation costs: NumPy and SciPy in the loader against the graph, on a whole brain and on a patch of one.

Both begin with the stored integers and label codes and end with the normalised image and the target, so that the line
which augments nothing is part of all others. The graph's figures are those of this host's processors; on a GPU it runs
there.
"""

from typing import Any, Callable, Dict, List, Tuple

from cpu3d.bench.data.files import Files
from cpu3d.bench.data.measuring import in_turn, seconds
from cpu3d.bench.data.options import Options
from cpu3d.bench.data.results import WARM, Line, Outcome
from cpu3d.bench.data.worker import in_fresh_process


def measure(files: Files, options: Options) -> Outcome:
    request = {"store": str(files.one_case()["npy"]), "patch": files.scale.patch, "rounds": options.rounds}
    found = in_fresh_process("augment_cost", request)
    lines: List[Line] = [Line(name, WARM, tuple(values)) for name, values in found["seconds"].items()]
    return Outcome("augment", f"Augmentation of a brain of {found['brain']}x4 and of a patch", tuple(lines))


def work(request: Dict[str, Any], _bucket: Any = None) -> Dict[str, Any]:
    """In the worker: seconds of every way."""
    from cpu3d.bench.data.tensors import tensorflow

    tensorflow()
    from cpu3d.bench.data.numpy_augment import WITH_TURNS
    from cpu3d.data.augment import NO_AUGMENT, AugmentConfig
    from cpu3d.data.region import centred
    from cpu3d.data.store import open_store

    store = open_store(request["store"])
    record = store.cases("train")[0]
    codes = tuple(tuple(members) for members in store.manifest.regions.values())
    patch = tuple(min(n, want) for n, want in zip(record.shape, request["patch"]))
    variants: Dict[str, Callable[[int], float]] = {}
    for what, region in (("brain", record.box), ("patch", centred(record.box, patch, record.shape))):
        part = region.slices(record.shape)
        arrays = store.image(record.case_id)[part], store.label(record.case_id)[part]
        for told, config in (
            ("none", NO_AUGMENT),
            ("flips, intensity", AugmentConfig()),
            ("and turns, zoom", WITH_TURNS),
        ):
            variants[f"{what}, {told}: NumPy, SciPy"] = _by_numpy(arrays, record, codes, config)
            variants[f"{what}, {told}: graph"] = _by_graph(arrays, record, codes, config)
    return {"seconds": in_turn(variants, request["rounds"]), "brain": "x".join(map(str, record.box.size))}


# --- Private helpers ---


def _normalisation(record: Any) -> Tuple[Any, Any]:
    import numpy as np

    scale = 1 / np.array(record.channel_std)
    return scale, -np.array(record.channel_mean) * scale


def _by_numpy(arrays: Any, record: Any, codes: Any, config: Any) -> Callable[[int], float]:
    import numpy as np

    from cpu3d.bench.data.numpy_augment import augmented
    from cpu3d.data.augment import NO_AUGMENT, sample_params

    table = np.zeros((256, len(codes)), np.uint8)
    for column, members in enumerate(codes):
        table[list(members), column] = 1
    scale, shift = map(np.float32, _normalisation(record))

    def once(number: int) -> float:
        params = sample_params(config, seed=1, position=number, channels=record.channels)

        def load():
            bits, label = arrays
            image = np.where(bits == 0, np.float32(0), bits * scale + shift)
            if config != NO_AUGMENT:
                planes = params.planes(record.spacing_mm) if config.resamples else None
                image, label = augmented(image, label, params, planes)
            return image, table[label]

        return seconds(load)

    return once


def _by_graph(arrays: Any, record: Any, codes: Any, config: Any) -> Callable[[int], float]:
    import numpy as np
    import tensorflow as tf

    from cpu3d.bench.data.tensors import touched
    from cpu3d.data.augment import sample_params
    from cpu3d.data.finish import Finish

    finish = Finish(codes=codes, resamples=config.resamples)
    graph = tf.function(lambda raw: finish(raw))
    scale, shift = _normalisation(record)
    bits, label = (np.ascontiguousarray(array) for array in arrays)

    def once(number: int) -> float:
        params = sample_params(config, seed=1, position=number, channels=record.channels)
        raw = {
            "bits": bits,
            "label": label,
            "is_half": np.bool_(False),
            "scale": np.float32(scale * params.gain),
            "shift": np.float32(shift * params.gain + params.offset),
            "flips": np.array(params.flips),
            "planes": params.planes(record.spacing_mm),
        }

        def load():
            image, target = graph({name: tf.convert_to_tensor(part) for name, part in raw.items()})
            return touched(image), touched(target)

        return seconds(load)

    return once
