"""The start of a run from the weights of another, `train --init`.

    transfer = open_transfer(config)            # checked; nothing is computed
    for row in init_rows(transfer.record): ...  # what is taken, for people
    array = transfer.first("model/000", fresh)  # a first weight of the new run

Layers are matched by name. In the first convolution a kernel's rows belong to image channels, in a
head its columns to regions: they are matched by these names. A new channel is zero at first, so
that the network answers as it did before; a new region is fresh. Of a first convolution that shares
no channel all is fresh. No TensorFlow."""

from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from cpu3d.data.cases.resample import in_mm
from cpu3d.data.datasets.names import channel_key
from cpu3d.data.normalise import of_all
from cpu3d.data.region import Array
from cpu3d.errors import InputError, raise_if_any
from cpu3d.run.checkpoint import BEST, SavedArrays, weights_file
from cpu3d.run.config_json import load_config
from cpu3d.run.trained_weights import run_weights
from cpu3d.settings import InitRecord, RunConfig
from cpu3d.util.records import listed
from models.config import UNetConfig
from models.strides import strides_text
from models.weights import network_weights

OF_RUN = ("channels", "outputs", "seed", "dtype", "policy", "deep_supervision", "average")
"""Settings of the network that may differ: they change no layer that both networks have, but for
the first convolution and the heads."""
DIGITS = 12  # of a SHA-256 that are shown
SEEN = "held-out cases"  # the name of the row on what weights have seen

Pairs = List[Tuple[int, int]]
"""The index of a channel or region in the new run, and in the other one."""


@dataclass(frozen=True)
class Transfer:
    """The weights of another run as a new run takes them."""

    record: InitRecord
    _arrays: SavedArrays
    _pieces: Mapping[str, "_Piece"]  # by the name of the new run's array

    def first(self, name: str, fresh: Array) -> Array:
        """An array of the new run before its first step, from the one that the run would have by
        itself."""
        piece = self._pieces.get(name)
        if piece is None:
            return fresh
        saved = self._arrays[piece.array]
        if piece.axis is None:
            return saved
        made = np.zeros_like(fresh) if piece.zeroes else fresh.copy()
        source = np.moveaxis(saved, piece.axis, 0)
        target = np.moveaxis(made, piece.axis, 0)  # a view
        for here, there in piece.pairs:
            target[here] = source[there]
        return made


@dataclass(frozen=True)
class _Piece:
    """What one array of a new run takes from one of another."""

    array: str  # name of the latter
    axis: Optional[int] = None  # of channels or regions; None if all is taken
    pairs: Sequence[Tuple[int, int]] = ()  # along that axis
    zeroes: bool = False  # whether the other indices become zero


def open_transfer(config: RunConfig) -> Transfer:
    """The weights that the run of `config` starts from. Their file stays open: it may be replaced
    meanwhile.

    Raises InputError if they are missing or damaged, and for another network, naming what differs.
    """
    file, old = _found(Path(config.init))
    raise_if_any(_differences(old.unet, config.unet, config.init))
    weights = run_weights(old, file)
    channels = _pairs(list(map(channel_key, config.channels)), list(map(channel_key, old.channels)))
    regions = _pairs(list(map(str.casefold, config.regions)), list(map(str.casefold, old.regions)))
    new_channels = _others(config.channels, channels)
    new_regions = _others(config.regions, regions)
    if new_channels and config.freeze != "none":
        raise InputError(
            f"--freeze {config.freeze} must come with channels that the weights were trained on, "
            f"got new {listed(new_channels)}; leave it out, so that the first layers learn to use "
            "them"
        )
    saved = {
        (weight.layer, weight.name): array
        for weight, array in zip(network_weights(old.unet), weights.names)
    }
    pieces: Dict[str, _Piece] = {}
    is_taken: Dict[str, bool] = {}  # by layer
    for weight in network_weights(config.unet):
        is_taken.setdefault(weight.layer, False)
        array = saved.get((weight.layer, weight.name))
        if array is None:  # of a head that only one of the networks has
            continue
        piece = _Piece(array)
        if weight.channel_axis is not None:
            piece = _Piece(array, weight.channel_axis, channels, zeroes=True)
        elif weight.region_axis is not None:
            piece = _Piece(array, weight.region_axis, regions)
        if piece.axis is None or piece.pairs:
            pieces[weight.array] = piece
            is_taken[weight.layer] = True
    split_hash = weights.state["split_hash"]
    record = InitRecord(
        file=str(file),
        sha256=weights.arrays.sha256,
        step=weights.state["step"],
        split_hash=split_hash,
        layers=len(is_taken),
        fresh_layers=tuple(layer for layer in is_taken if not is_taken[layer]),
        channels=tuple(name for name in config.channels if name not in new_channels),
        new_channels=new_channels,
        regions=tuple(name for name in config.regions if name not in new_regions),
        new_regions=new_regions,
        seen=_has_seen(config, old, split_hash),
        warnings=_other_inputs(config, old, channels),
    )
    return Transfer(record, weights.arrays, pieces)


def network_of_init(init: str) -> UNetConfig:
    """The network whose weights a run with `init` starts from. Raises InputError if there are no
    weights."""
    return _found(Path(init))[1].unet


def init_rows(record: InitRecord) -> List[Tuple[str, str]]:
    """Name and text of what a run has taken from other weights."""
    weights = f"{record.file}, after step {record.step}, SHA-256 {record.sha256[:DIGITS]}"
    layers = f"all {record.layers}"
    if record.fresh_layers:
        taken = record.layers - len(record.fresh_layers)
        layers = f"{taken} of {record.layers}; fresh: {listed(record.fresh_layers)}"
    first = "zero at first" if record.channels else "fresh"
    rows = [
        ("weights", weights),
        ("layers", layers),
        ("channels", _kept_and_new(record.channels, record.new_channels, first)),
        ("regions", _kept_and_new(record.regions, record.new_regions, "fresh")),
        (SEEN, seen_words(record)),
    ]
    return rows + [("warning", words) for words in record.warnings]


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


# --- Private helpers ---


def _found(path: Path) -> Tuple[Path, RunConfig]:
    """The best weights of a run, else its last, or a file of them; and the run's settings."""
    if path.is_dir():
        config = load_config(path)
        weights = "best" if (path / "checkpoints" / BEST).is_file() else "last"
        return weights_file(path, weights), config
    for run in (path.parent, path.parent.parent):
        if path.is_file() and (run / "config.json").is_file():
            return path, load_config(run)
    raise InputError(
        f"init {path} must be a run, or a file of weights with its run's config.json, found none; "
        "name a run that `train` has written"
    )


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
    return [
        f"the network must be that of --init {init}, got {listed(differing)}; give the same "
        "settings, or leave --init out"
    ]


def _has_seen(new: RunConfig, old: RunConfig, split_hash: str) -> Optional[bool]:
    """Whether weights of the run `old` were trained on cases that `new` holds out. Known only of
    runs of the same split, with the weights that they started from."""
    if split_hash != new.split_hash:
        return None
    if old.fold != new.fold:
        return True
    return False if old.init_record is None else old.init_record.seen


def _pairs(new: Sequence[str], old: Sequence[str]) -> Pairs:
    """The indices of each name that both have."""
    return [(index, old.index(name)) for index, name in enumerate(new) if name in old]


def _others(names: Sequence[str], pairs: Pairs) -> Tuple[str, ...]:
    """The names without a pair."""
    shared = [here for here, _ in pairs]
    return tuple(name for index, name in enumerate(names) if index not in shared)


def _other_inputs(new: RunConfig, old: RunConfig, channels: Pairs) -> Tuple[str, ...]:
    """What of the images is not as the weights were trained on: the normalisation of a channel
    that both have, and the size of voxels that cases are resampled to."""
    lines = []
    kinds = of_all(new.normalisation_of(new.channels), len(new.channels))
    old_kinds = of_all(old.normalisation_of(old.channels), len(old.channels))
    for here, there in channels:
        if kinds[here] != old_kinds[there]:
            lines.append(
                f"channel {new.channels[here]} is normalised by {kinds[here].words}, the weights "
                f"were trained on {old_kinds[there].words}"
            )
    if new.target_spacing_mm != old.target_spacing_mm:
        trained = in_mm(old.target_spacing_mm)
        lines.append(
            f"the store's spacing is {in_mm(new.target_spacing_mm)}, the weights were trained on "
            f"{trained}"
        )
    return tuple(lines)


def _kept_and_new(kept: Sequence[str], new: Sequence[str], first: str) -> str:
    parts = []
    if kept:
        parts.append(f"{', '.join(kept)} taken by name")
    if new:
        parts.append(f"{', '.join(new)} new, {first}")
    return "; ".join(parts)
