"""Open a store's cases for reading, the way that suits this host: checked once, mapped once, counted together."""

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Iterable, Iterator, List, Mapping, Optional, Sequence

from cpu3d.data.case_index import distinct
from cpu3d.data.files.read_mode import ReadPlan, choose_read_mode, file_system
from cpu3d.data.files.reader import Reader
from cpu3d.data.records import CaseRecord
from cpu3d.data.sharding import ALL, Share
from cpu3d.data.store import Store
from cpu3d.errors import InputError


@dataclass(frozen=True)
class Reading:
    """How the cases of a store are read. The datasets of a run share one."""

    reader: Reader
    plan: ReadPlan
    split_bytes: Mapping[str, int]
    """Bytes of the files of each split that it was opened for."""

    def budget_of(self, split: str) -> int:
        """The part of the plan's page budget that a dataset of this split may use: each has its own pages there."""
        total = sum(self.split_bytes.values())
        return self.plan.page_budget_bytes * self.split_bytes[split] // total


def open_reading(
    store: Store,
    splits: Sequence[str] = ("train",),
    *,
    free_bytes: int,
    read_mode: str = "auto",
    page_budget_bytes: Optional[int] = None,
    patches: bool = False,
    share: Share = ALL,
) -> Reading:
    """Look at every array of these splits once, at no voxel, and choose how to read them.

    `free_bytes` is the memory that a run may use here; `read_mode` is one of READ_MODES; `page_budget_bytes` says how
    many pages to leave in memory, None leaves it to the plan; `patches` tells that parts will be read and not whole
    volumes. The workers of a run look at a `share` of the arrays each, together at all of them, and count all bytes.
    Raises InputError for an unknown or empty split, for cases without labels, for all arrays that are damaged, and for
    "ram" when they do not fit.
    """
    split_bytes = {}
    for split in splits:
        sizes: List[int] = []
        counted = _counted(distinct(labelled(store, split)), sizes)
        store.check(itertools.islice(counted, share.rank, None, share.workers))
        split_bytes[split] = sum(sizes)
    plan = choose_read_mode(
        read_mode,
        file_system=file_system(store.folder),
        needed_bytes=sum(split_bytes.values()),
        free_bytes=free_bytes,
        patches=patches,
    )
    if page_budget_bytes is not None:
        plan = dataclasses.replace(plan, page_budget_bytes=page_budget_bytes)
    return Reading(Reader(store.folder, plan.mode), plan, split_bytes)


def labelled(store: Store, split: str) -> Sequence[CaseRecord]:
    """The cases of a split. Raises InputError when there is no such split, it is empty, or a case has no label."""
    if split not in store.manifest.split:
        raise InputError(f"split must be one of {', '.join(store.manifest.split)}, got {split!r}; pick one")
    records = store.cases(split)
    if not records:
        raise InputError(
            f"split {split!r} of {store.folder} must hold cases, it is empty; prepare with another --split"
        )
    bare = sorted(set(store.manifest.unlabelled) & set(store.manifest.split[split]))
    if bare:
        raise InputError(*(f"case {case_id} must have a label to train or score on, it has none" for case_id in bare))
    return records


# --- Private helpers ---


def _counted(records: Iterable[CaseRecord], sizes: List[int]) -> Iterator[CaseRecord]:
    """`records`, their files' bytes noted on the way: one pass over a large store is enough."""
    for record in records:
        sizes.append(record.image_bytes + record.label_bytes)
        yield record
