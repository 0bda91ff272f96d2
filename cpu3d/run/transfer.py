"""The start of a run from the weights of another, `train --init`.

    transfer = open_transfer(config)            # checked; nothing is computed
    for row in init_rows(transfer.record): ...  # what is taken, for people
    array = transfer.first("model/000", fresh)  # a first weight of the new run

Layers are matched by name. In the first convolution a kernel's rows belong to image channels, in a
head its columns to regions: they are matched by these names. A new channel is zero at first, so
that the network answers as it did before; a new region is fresh. Of a first convolution that shares
no channel all is fresh. No TensorFlow."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.cases.resample import in_mm
from cpu3d.data.datasets.names import channel_key
from cpu3d.data.normalise import of_all
from cpu3d.data.region import Array
from cpu3d.errors import InputError, raise_if_any
from cpu3d.run.checkpoint import BEST, DamagedCheckpointError, weights_file
from cpu3d.run.config_json import load_config
from cpu3d.run.trained_weights import RunWeights, run_weights
from cpu3d.settings import InitRecord, RunConfig
from cpu3d.util.records import count, listed
from memory_estimator.common.files import typed
from models.config import UNetConfig
from models.strides import strides_text
from models.weights import Weight, is_frozen, network_weights

NAMED = "name a run that `train` has written, or one of its .npz files of weights"
KERAS = (".h5", ".hdf5", ".keras")
OF_RUN = ("channels", "outputs", "seed", "dtype", "policy", "deep_supervision")
"""Settings of the network that may differ: they change no layer that both networks have, but for
the first convolution and the heads."""
DIGITS = 12  # of a SHA-256 that are shown
SEEN = "held-out cases"  # the name of the row on what weights have seen


@dataclass(frozen=True)
class Transfer:
    """The weights of another run as a new run takes them."""

    record: InitRecord
    _weights: RunWeights
    _pieces: Mapping[str, "_Piece"]  # by the name of the new run's array

    def first(self, name: str, fresh: Array) -> Array:
        """An array of the new run before its first step, from the one that the run would have by
        itself."""
        piece = self._pieces.get(name)
        if piece is None:
            return fresh
        return piece.placed(self._weights.arrays[piece.array], fresh)


def open_transfer(config: RunConfig) -> Transfer:
    """The weights that the run of `config` starts from. Their file stays open: it may be replaced
    meanwhile.

    Raises InputError if they are missing or damaged, and for another network, naming what differs.
    """
    source = _found(Path(config.init))
    old = source.config
    if old is None:
        old = dataclasses.replace(config, freeze="none")
    raise_if_any(_differences(old.unet, config.unet, config.init))
    weights = _opened(source, old)
    pieces, of_layers = _matched(old, config, weights)
    channels = [here for here, _ in _channel_places(config, old)]
    regions = [here for here, _ in _region_places(config, old)]
    new_channels = _others(config.channels, channels)
    new_regions = _others(config.regions, regions)
    if new_channels and config.freeze != "none":
        rule = f"--freeze {config.freeze} must come with channels that the weights know"
        todo = "leave it out, so that the first layers learn to use them"
        raise InputError(f"{rule}, got new {listed(new_channels)}; {todo}")
    record = InitRecord(
        file=str(source.file),
        sha256=weights.arrays.sha256(),
        step=weights.state["step"],
        split_hash=weights.state["split_hash"],
        layers=len(of_layers),
        fresh_layers=tuple(layer for layer, is_taken in of_layers.items() if not is_taken),
        channels=tuple(name for name in config.channels if name not in new_channels),
        new_channels=new_channels,
        regions=tuple(name for name in config.regions if name not in new_regions),
        new_regions=new_regions,
        are_named=source.config is not None,
        seen=_has_seen(config, source.config, weights.state["split_hash"]),
        warnings=_other_inputs(config, old),
    )
    return Transfer(record, weights, pieces)


def network_of_init(init: str) -> Optional[UNetConfig]:
    """The network whose weights a run with `init` starts from; None for a file alone, of which it
    is not known. Raises InputError if there are no weights."""
    source = _found(Path(init))
    return source.config.unet if source.config else None


def init_rows(record: InitRecord) -> List[Tuple[str, str]]:
    """Name and text of what a run has taken from other weights."""
    weights = f"{record.file}, after step {record.step}, SHA-256 {record.sha256[:DIGITS]}"
    layers = f"all {record.layers}"
    if record.fresh_layers:
        taken = record.layers - len(record.fresh_layers)
        layers = f"{taken} of {record.layers}; fresh: {listed(record.fresh_layers)}"
    first = "zero at first" if record.channels else "fresh"
    channels = _kept_and_new(record.channels, record.new_channels, first)
    regions = _kept_and_new(record.regions, record.new_regions, "fresh")
    if not record.are_named:
        channels = f"{len(record.channels)} in their order, as there is no config.json to name them"
        regions = f"{len(record.regions)} in their order"
    rows = [
        ("weights", weights),
        ("layers", layers),
        ("channels", channels),
        ("regions", regions),
        (SEEN, seen_words(record)),
    ]
    return rows + [("warning", words) for words in record.warnings]


def start_words(config: RunConfig) -> str:
    """Where a run's first weights are from and what of them stays, in short; "" for its own."""
    record = config.init_record
    if record is None:
        return ""
    words = f"{record.file}, SHA-256 {record.sha256[:DIGITS]}"
    if config.freeze != "none":
        words += f"; frozen: {freeze_words(config)}"
    return words


def freeze_words(config: RunConfig) -> str:
    """What of a run's network stays as it is, in words."""
    if config.freeze == "none":
        return "nothing"
    layers = list(dict.fromkeys(weight.layer for weight in network_weights(config.unet)))
    frozen = [layer for layer in layers if is_frozen(layer, config.freeze)]
    return f"{config.freeze}, {len(frozen)} of {count(layers, 'layer')} with weights"


def leak(record: Optional[InitRecord]) -> str:
    """What is wrong with a run that is to be scored on patients whom its first weights have seen;
    "" if nothing is known."""
    if record is None or not record.seen:
        return ""
    rule = "--init must hold weights that were not trained on the held-out patients"
    todo = "start from a run of the same fold, or from weights of other patients"
    return f"{rule}, got {record.file}, of another fold of the same split; {todo}"


def seen_words(record: InitRecord) -> str:
    """Whether a run's first weights have seen its held-out patients."""
    if record.seen is None:
        return "not known whether these weights were trained on their patients"
    if record.seen:
        return "these weights were trained on some of their patients: their scores are too good"
    return "these weights are of the same split: they were trained on none of their patients"


# --- Private helpers: the source ---


@dataclass(frozen=True)
class _Source:
    """Weights that were named."""

    file: Path
    run: Optional[Path] = None  # None for a file that lies elsewhere, of which nothing is known
    config: Optional[RunConfig] = None  # of that run


def _found(path: Path) -> _Source:
    """The best weights of a run, else its last; or a file."""
    if path.is_dir():
        config = load_config(path)
        weights = "best" if (path / "checkpoints" / BEST).is_file() else "last"
        return _Source(weights_file(path, weights), path, config)
    rule = f"init {path} must be a run or a file of weights"
    if not path.is_file():
        raise InputError(f"{rule}, found none; {NAMED}")
    if path.suffix.lower() in KERAS:
        todo = "load it in Python and train it with `fit` (docs/training.md), or " + NAMED
        raise InputError(f"{rule}, got one of Keras, without names of channels; {todo}")
    run = _run_of(path)
    return _Source(path, run, load_config(run) if run else None)


def _run_of(file: Path) -> Optional[Path]:
    """The run of a file of weights, which may be gone."""
    folder = file.parent
    if folder.name == "checkpoints":
        folder = folder.parent
    return folder if (folder / "config.json").is_file() else None


def _opened(source: _Source, config: RunConfig) -> RunWeights:
    """The weights in a file, all of which are finite; `config` is of their run, or for a file
    without one of the new run, whose shapes they must have then."""
    path = source.file
    rule = f"init {path} must be whole weights that `train` has written"
    try:
        weights = run_weights(config, path)
        typed(weights.state.get("step"), int, "step")
        typed(weights.state.get("split_hash"), str, "split_hash")
    except (DamagedCheckpointError, ValueError):
        raise InputError(f"{rule}, got a damaged or another file; {NAMED}") from None
    except InputError:
        if source.config:
            raise
        rule = f"init {path}, a file alone, must have the shapes of this run's weights"
        todo = "put the config.json of its run beside it, which has names, or name that run"
        raise InputError(f"{rule}, got others; {todo}") from None
    for name in weights.names:
        if not np.isfinite(weights.arrays[name]).all():
            raise InputError(f"{rule}, got some in {name} that are not finite; {NAMED}")
    return weights


def _differences(old: UNetConfig, new: UNetConfig, init: str) -> List[str]:
    """A line that names in what the networks differ; none if one takes the weights of the other."""
    differing = []
    for name, value in vars(new).items():
        before = getattr(old, name)
        if name in OF_RUN or before == value:
            continue
        if name == "strides":
            if old.depth != new.depth:  # which is named
                continue
            name = "--strides"
            value = strides_text(new.every_stride)
            before = strides_text(old.every_stride)
        differing.append(f"{name} {value} for {before}")
    if not differing:
        return []
    rule = f"the network must be that of --init {init}"
    return [f"{rule}, got {listed(differing)}; give the same settings, or leave --init out"]


def _has_seen(new: RunConfig, old: Optional[RunConfig], split_hash: str) -> Optional[bool]:
    """Whether weights of a run `old`, None for a file alone, were trained on cases that `new` holds
    out. Known only of runs of the same split, with the weights that they started from."""
    if old is None or split_hash != new.split_hash:
        return None
    if old.fold != new.fold:
        return True
    return False if old.init_record is None else old.init_record.seen


# --- Private helpers: what is taken ---


@dataclass(frozen=True)
class _Piece:
    """What one array of a new run takes from one of another."""

    array: str  # name of the latter
    axis: Optional[int] = None  # along which places are picked; None if all is taken
    places: Sequence[Tuple[int, int]] = ()  # along it: here, and in the other array
    zeroes: bool = False  # whether the other places become zero

    def placed(self, saved: Array, fresh: Array) -> Array:
        """The first values of the new array."""
        if self.axis is None:
            return saved
        made = np.zeros_like(fresh) if self.zeroes else fresh.copy()
        source = np.moveaxis(saved, self.axis, 0)
        target = np.moveaxis(made, self.axis, 0)  # a view
        for here, there in self.places:
            target[here] = source[there]
        return made


def _matched(
    old: RunConfig, new: RunConfig, weights: RunWeights
) -> Tuple[Dict[str, _Piece], Dict[str, bool]]:
    """The pieces by the names of the new run's arrays; and layer -> whether any of it is taken."""
    saved = dict(zip(_keys(network_weights(old.unet)), weights.names))
    channels = _channel_places(new, old)
    regions = _region_places(new, old)
    pieces: Dict[str, _Piece] = {}
    of_layers: Dict[str, bool] = {}
    needed = network_weights(new.unet)
    for key, weight in zip(_keys(needed), needed):
        of_layers.setdefault(weight.layer, False)
        array = saved.get(key)
        if array is None:  # of a head that only one of the networks has
            continue
        piece = _Piece(array)
        if weight.channel_axis is not None:
            piece = _Piece(array, weight.channel_axis, channels, zeroes=bool(channels))
        elif weight.region_axis is not None:
            piece = _Piece(array, weight.region_axis, regions)
        if piece.axis is None or piece.places:
            pieces[weight.array] = piece
            of_layers[weight.layer] = True
    return pieces, of_layers


def _keys(weights: Sequence[Weight]) -> List[Tuple[str, str]]:
    """By which the weights of two networks are matched."""
    return [(weight.layer, weight.name) for weight in weights]


def _channel_places(new: RunConfig, old: RunConfig) -> List[Tuple[int, int]]:
    """The places of each channel that both have, whose names are compared as everywhere."""
    return _places([*map(channel_key, new.channels)], [*map(channel_key, old.channels)])


def _region_places(new: RunConfig, old: RunConfig) -> List[Tuple[int, int]]:
    """The places of each region that both have, whatever the case of its name."""
    return _places([*map(str.casefold, new.regions)], [*map(str.casefold, old.regions)])


def _places(new: Sequence[str], old: Sequence[str]) -> List[Tuple[int, int]]:
    """The places of each name that both have."""
    return [(place, old.index(name)) for place, name in enumerate(new) if name in old]


def _others(names: Sequence[str], places: Sequence[int]) -> Tuple[str, ...]:
    """The names at other places."""
    return tuple(name for place, name in enumerate(names) if place not in places)


def _other_inputs(new: RunConfig, old: RunConfig) -> Tuple[str, ...]:
    """What of the images is not as the weights know it: the normalisation of a channel that both
    have, and the size of voxels that cases are resampled to."""
    lines = []
    here = of_all(new.normalisation_of(new.channels), len(new.channels))
    there = of_all(old.normalisation_of(old.channels), len(old.channels))
    for place, before in _channel_places(new, old):
        if here[place] != there[before]:
            words = f"{here[place].words}, the weights know {there[before].words}"
            lines.append(f"channel {new.channels[place]} is normalised by {words}")
    if new.target_spacing_mm != old.target_spacing_mm:
        known = in_mm(old.target_spacing_mm)
        lines.append(
            f"the store's spacing is {in_mm(new.target_spacing_mm)}, the weights know {known}"
        )
    return tuple(lines)


# --- Private helpers: words ---


def _kept_and_new(kept: Sequence[str], new: Sequence[str], first: str) -> str:
    parts = []
    if kept:
        parts.append(f"{', '.join(kept)} taken by name")
    if new:
        parts.append(f"{', '.join(new)} new, {first}")
    return "; ".join(parts)
