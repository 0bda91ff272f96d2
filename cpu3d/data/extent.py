"""How much of a case the network sees: its brain's box or its whole grid. Lossless either way, never downsampled."""

from cpu3d.data.records import CaseRecord
from cpu3d.data.region import Region, Shape3, centred, round_up, whole
from cpu3d.data.store import Store
from cpu3d.errors import InputError

EXTENTS = ("brain", "full")


def grid_size(store: Store, *, extent: str, multiple: int) -> Shape3:
    """The size (X, Y, Z) that `volume_dataset` gives every case: the largest box, or grid, of the store, rounded up."""
    if extent not in EXTENTS:
        raise InputError(f"extent must be one of {', '.join(EXTENTS)}, got {extent!r}; pick one")
    manifest = store.manifest
    return round_up(manifest.largest_box if extent == "brain" else manifest.largest_shape, multiple)


def case_region(record: CaseRecord, size: Shape3, extent: str) -> Region:
    """Where a region of `size` lies in a case: around the brain, or around the whole grid."""
    return centred(record.box if extent == "brain" else whole(record.shape), size, record.shape)
