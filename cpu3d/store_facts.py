"""What a run knows of its store, as config.json holds it."""

from dataclasses import dataclass, field
from typing import Dict, Optional, Sequence, Tuple

from cpu3d.data.manifest import Code
from cpu3d.data.nifti import is_placed
from cpu3d.data.normalise import Normalisation
from cpu3d.data.store import Store
from cpu3d.errors import InputError
from models.strides import common_spacing


@dataclass(frozen=True)
class StoreFacts:
    """What a run knows of its store."""

    store: str = ""  # its folder
    store_channels: Tuple[str, ...] = ()  # all of the store: an image to predict on must have them
    label_names: Dict[int, str] = field(default_factory=dict)  # by label code, of predictions too
    # region -> label codes of the store
    region_codes: Dict[str, Tuple[Code, ...]] = field(default_factory=dict)
    paint: Tuple[Tuple[str, Code], ...] = ()  # as of the store's manifest
    split_hash: str = ""  # of the store the run was started on: a run never moves to another split
    spacing_mm: Optional[Tuple[float, float, float]] = None
    """Along R, A, S: the median of the training cases on each axis."""
    target_spacing_mm: Optional[Tuple[float, float, float]] = None
    """Along R, A, S: what the store's cases and images to predict on are resampled to; None if they
    are seen as they are."""
    oriented: Optional[bool] = None
    """Whether the training cases' files gave the patient's orientation; None if only some did."""
    normalisation: Tuple[Normalisation, ...] = ()
    """Of each channel of the store; empty if all are normalised over the foreground."""

    def normalisation_of(self, channels: Sequence[str]) -> Tuple[Normalisation, ...]:
        """That of some of the store's channels, by name."""
        if not self.normalisation:
            return ()
        own = dict(zip(self.store_channels, self.normalisation))
        return tuple(own[name] for name in channels)


def store_facts(store: Store) -> StoreFacts:
    """What a run knows of its store, as its fold sees it. Raises InputError if no case is to be
    trained on."""
    manifest = store.manifest
    if not manifest.split["train"]:
        raise InputError(
            f"split train of {store.folder} must hold cases, got none; prepare with another --split"
        )
    records = store.cases("train")
    placed = {is_placed(record.geometry) for record in records}
    return StoreFacts(
        store=str(store.folder.resolve()),
        store_channels=manifest.channels,
        label_names=manifest.labels,
        region_codes=manifest.regions,
        paint=manifest.paint,
        split_hash=manifest.split_hash,
        spacing_mm=common_spacing([record.spacing_mm for record in records]),
        target_spacing_mm=manifest.target_spacing_mm,
        oriented=placed.pop() if len(placed) == 1 else None,
        normalisation=manifest.normalisation,
    )
