"""The data of a run's steps and validations: whole volumes or patches, in an order that follows
from the position."""

import functools
import math
import statistics
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

import tensorflow as tf

from cpu3d.data.files.reader import Reader
from cpu3d.data.sampling import ALL, Share, VolumeSampling, case_at, volume_at
from cpu3d.data.source import Batches, open_reading, patch_dataset, volume_dataset
from cpu3d.data.store import Store, case_box, case_region
from cpu3d.settings import RunConfig

# Patches prepared at a time if a card computes and the CPU is free for them.
PREPARING_FOR_A_CARD = 4

# The voxels X, Y, Z of a volume that are of its case, not added around it.
Inside = Tuple[slice, slice, slice]


class RunData:
    """The data of a run: of its steps, and of validations on whole volumes."""

    def __init__(
        self, store: Store, config: RunConfig, share: Share = ALL, reader: Optional[Reader] = None
    ):
        """`share` is this worker's of batches and held-out cases; `reader` is shared with other
        data."""
        self.config = config
        self._store = store
        self._share = share
        self._train_cases = store.manifest.split["train"]
        self._volumes = VolumeSampling(
            config.extent,
            multiple=config.unet.divisors,
            seed=config.seed,
            whole_every=config.whole_every,
            batch=config.batch,
        )
        self.held_out = len(store.manifest.split["val"])
        self.reader = reader or open_reading(
            store,
            [split for split in ("train", "val") if store.manifest.split[split]],
            share=share,
        )
        self._common: Dict[str, Any] = {
            "extent": config.extent,
            "channels": config.channels,
            "regions": config.regions,
            "dtype": config.unet.dtype,
            "reader": self.reader,
        }

    def training(
        self, start: int, stop: int, watch: Callable[[str], None] = lambda phase: None
    ) -> "MicroBatches":
        """This worker's micro-batches (image, target) from step `start` to step `stop`, as the
        network sees them; `watch` is called before and after each wait for one."""
        config = self.config
        options: Dict[str, Any] = {
            "start": start * config.batch,
            "stop": stop * config.batch,
            "seed": config.seed,
            "batch": config.micro,
            "augment": config.augment,
            "share": self._share,
            **self._common,
        }
        if config.is_patch:
            dataset = patch_dataset(
                self._store,
                config.grid,
                sampling="foreground",
                threads=1 if config.device == "cpu" else PREPARING_FOR_A_CARD,
                **options,
            )
        else:
            dataset = volume_dataset(
                self._store,
                split="train",
                multiple=config.unet.divisors,
                whole_every=config.whole_every,
                **options,
            )
        return MicroBatches(dataset, watch)

    def validation(self) -> Iterable[Tuple[tf.Tensor, tf.Tensor]]:
        """This worker's held-out cases (1, X, Y, Z, ...), whole, each on its own grid at full
        resolution, not augmented."""
        dataset = volume_dataset(
            self._store,
            split="val",
            multiple=self.config.unet.divisors,
            stop=self.held_out,
            shuffle=False,
            share=self._share.singly(),
            **self._common,
        )
        return Batches(dataset)

    def held_out_share(self) -> Tuple[int, ...]:
        """The indices of `validation`'s cases among all `held_out` ones, in its order."""
        return self._share.singly().positions(0, self.held_out)

    def inside(self, held_out: int) -> Inside:
        """Where the case of this index among all `held_out` ones is in its volume of
        `validation`."""
        record = self._store.cases("val")[held_out]
        extent = self.config.extent
        size = self.config.grid_of(case_box(record, extent).size)
        region = case_region(record, size, extent)
        sides = zip(region.padding(record.shape), region.size)
        x, y, z = (slice(before, size - after) for (before, after), size in sides)
        return x, y, z

    def voxels(self, step: int) -> int:
        """Voxels that all workers' networks see in a step, those of its finest level."""
        config = self.config
        if config.is_patch:
            return config.batch * math.prod(config.grid)
        records = self._store.cases("train")
        voxels = 0
        for first in range(step * config.batch, (step + 1) * config.batch, config.micro):
            together = range(first, first + config.micro)
            volume = volume_at(first, self._volumes, records, together)
            voxels += config.micro * math.prod(volume.region.size)
        return voxels // math.prod(config.unet.average)

    @functools.cached_property
    def mean_voxels(self) -> float:
        """The mean of `voxels` over steps of all cases, whole and cropped."""
        steps = max(len(self._train_cases) // self.config.batch, 1) * self.config.whole_every
        return statistics.fmean(self.voxels(step) for step in range(steps))

    def case_ids(self, step: int) -> List[str]:
        """The cases of a step, a name for each volume or patch."""
        config = self.config
        cases = self._train_cases
        positions = range(step * config.batch, (step + 1) * config.batch)
        return [cases[case_at(each, cases=len(cases), seed=config.seed)] for each in positions]


class MicroBatches:
    """An iterator over micro-batches that counts the seconds spent waiting for them."""

    def __init__(self, dataset: tf.data.Dataset, watch: Callable[[str], None]):
        self._batches = Batches(dataset)
        self._watch = watch
        self._waited_s = 0.0

    def waited_s(self) -> float:
        """Seconds of waiting since the last call."""
        waited_s = self._waited_s
        self._waited_s = 0.0
        return waited_s

    def __iter__(self) -> Iterator[Tuple[tf.Tensor, tf.Tensor]]:
        return self

    def __next__(self) -> Tuple[tf.Tensor, tf.Tensor]:
        self._watch("waiting for data")
        begin = time.perf_counter()
        micro_batch = next(self._batches)
        self._waited_s += time.perf_counter() - begin
        self._watch("computing")
        return micro_batch
