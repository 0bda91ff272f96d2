"""How much of a case the network sees: its brain's box or its whole grid. Lossless either way, never downsampled."""

import numbers

from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Region, Shape3, centred, round_up, whole
from cpu3d.data.store import Store
from cpu3d.errors import InputError

EXTENTS = ("brain", "full")


def grid_size(store: Store, *, extent: str, multiple: int) -> Shape3:
    """The size (X, Y, Z) that `volume_dataset` gives every case: the largest box, or grid, of the store, rounded up.

    Raises InputError for an unknown extent and for a multiple below 1.
    """
    problems = []
    if extent not in EXTENTS:
        problems.append(f"extent must be one of {', '.join(EXTENTS)}, got {extent!r}; pick one")
    if not isinstance(multiple, numbers.Integral) or multiple < 1:
        problems.append(f"multiple must be an integer of at least 1, got {multiple!r}; give another")
    if problems:
        raise InputError(*problems)
    manifest = store.manifest
    return round_up(manifest.largest_box if extent == "brain" else manifest.largest_shape, multiple)


def case_region(record: CaseRecord, size: Shape3, extent: str) -> Region:
    """Where a region of `size` lies in a case: around the brain, or around the whole grid."""
    return centred(record.box if extent == "brain" else whole(record.shape), size, record.shape)
