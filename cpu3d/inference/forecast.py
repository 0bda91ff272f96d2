"""Predicts what the answer on an image takes, once the image is read and its box is known, before
the network sees it.

    forecaster = forecaster_of(predictors, Inference(), WRITTEN_BYTES)
    forecaster.forecast(record)    # memory, time, and whether one pass fits
"""

import math
from dataclasses import dataclass
from typing import Any, Optional, Sequence, Tuple

from cpu3d.data.manifest import CaseRecord
from cpu3d.data.region import Shape3
from cpu3d.data.store import case_box
from cpu3d.data.windows import window_count
from cpu3d.errors import DoesNotFitError
from cpu3d.host.memory import allocator_peak_bytes, peak_rss_bytes, status_sizes
from cpu3d.inference.runs import Inference, mirrored_axes_of, window_of
from cpu3d.settings import RunConfig
from memory_estimator.calibration import find_constants
from memory_estimator.common.units import by, format_bytes, format_seconds
from memory_estimator.forward_pass import forward_pass
from memory_estimator.host import Host, read_host
from memory_estimator.installed import installed_engine
from memory_estimator.job import Job
from models.strides import shape3

LEFT_BYTES = 3  # of each voxel of an image that was read, measured (records/log.md)
NORMALISED_COPIES = 5  # of the scores, in float32, while they are made
# Of each voxel of an answer, measured likewise.
WRITTEN_BYTES = 6  # the label as painted, turned and packed
POSTPROCESSED_BYTES = 10  # components, and the probabilities of a region
PROBABILITIES_BYTES = 20  # as they are, turned and packed
SCORED_BYTES = 20  # masks, components and distances
WRITTEN_S = 1e-7

SPARE = 1.1  # times the predicted peak must be free


@dataclass(frozen=True)
class Forecast:
    """Memory and time of the answer on one image."""

    grid: Shape3  # that the network sees
    in_windows: bool  # of the training's largest grid, as one pass would not fit
    peak_bytes: int  # of the process, until the answer is written
    seconds: float  # after the image was read
    free_bytes: int

    @property
    def fits(self) -> bool:
        return SPARE * self.peak_bytes <= self.free_bytes

    def __str__(self) -> str:
        """Such as "144 x 176 x 144 voxels, 1.21 GiB of 9.5 GiB free, about 5 s of the network"."""
        words = [f"{by(self.grid, ' x ')} voxels"]
        if self.in_windows:
            words.append("in windows")
        words.append(f"{format_bytes(self.peak_bytes)} of {format_bytes(self.free_bytes)} free")
        return ", ".join([*words, f"about {format_seconds(self.seconds)} of the network"])


class Forecaster:
    """Makes the forecasts of images that runs answer on together, on the CPUs of a host with so
    much memory for this process."""

    def __init__(
        self,
        configs: Sequence[RunConfig],
        inference: Inference,
        host: Host,
        free_bytes: int,
        written_bytes: int = WRITTEN_BYTES,
    ):
        self._configs = configs
        self._inference = inference
        self._host = host
        self._free_bytes = free_bytes
        self._written_bytes = written_bytes
        # By networks that have computed in this process, a training's too.
        self._kept_bytes = allocator_peak_bytes() or 0
        self._base_bytes = status_sizes().get("VmRSS", peak_rss_bytes()) - self._kept_bytes

    def forecast(self, record: CaseRecord) -> Forecast:
        """The forecast of a case that is in memory and answered next. Runs on whole volumes
        answer in windows where one pass would not fit. Raises DoesNotFitError for what
        does not fit so."""
        made, network_bytes = self._forecast(record, in_windows=False)
        can_slide = all(not window_of(config, self._inference) for config in self._configs)
        if not made.fits and can_slide:
            made, network_bytes = self._forecast(record, in_windows=True)
        if not made.fits:
            raise DoesNotFitError(
                f"the prediction of case {record.case_id} must leave a tenth of its memory free, "
                f"got {made}; slide a smaller --window X Y Z"
            )
        self._kept_bytes = max(self._kept_bytes, network_bytes)
        return made

    def _forecast(self, record: CaseRecord, in_windows: bool) -> Tuple[Forecast, int]:
        constants = find_constants(self._host)
        network_bytes = 0  # the most of any run: they answer one after the other
        answers_bytes = 0  # of all of them, float32, until they are written
        making_bytes = 0  # of two maps of logits more, or of scores, while they are made
        normalised_bytes = 0  # of the scores, before that
        seconds = WRITTEN_S * math.prod(record.scored_shape)
        for config in self._configs:
            grid = config.grid_of(case_box(record, config.extent).size)
            window = window_of(config, self._inference) or (config.grid if in_windows else grid)
            window = shape3(map(min, window, grid))
            threads = self._host.usable_cores
            job = Job(config.unet, window, engine=installed_engine(), threads=threads)
            passed = forward_pass(job, constants)
            network_bytes = max(network_bytes, passed.bytes)
            voxels = math.prod(grid)
            answers_bytes += 4 * config.unet.outputs * voxels
            most = max(config.unet.outputs, config.unet.channels)
            making_bytes = max(making_bytes, 8 * most * voxels)
            scores = NORMALISED_COPIES * config.unet.channels
            normalised_bytes = max(normalised_bytes, 4 * scores * voxels)
            passes = 2 ** len(mirrored_axes_of(config, self._inference))
            passes *= window_count(grid, window, self._inference.overlap)
            if config.whole_every > 1:
                passes *= 1 + config.crop_share  # and the crop around what was found
            seconds += passes * passed.seconds
        written_bytes = self._written_bytes * math.prod(record.scored_shape)
        answering_bytes = max(network_bytes, self._kept_bytes) + answers_bytes
        answering_bytes += max(making_bytes, written_bytes)
        image_bytes = (2 * len(record.channel_mean) + LEFT_BYTES) * math.prod(record.shape)
        peak_bytes = self._base_bytes + image_bytes
        peak_bytes += max(self._kept_bytes + normalised_bytes, answering_bytes)
        made = Forecast(grid, in_windows, peak_bytes, seconds, self._free_bytes)
        return made, network_bytes


def forecaster_of(
    predictors: Sequence[Any], inference: Inference, written_bytes: int
) -> Optional[Forecaster]:
    """The forecaster of loaded runs; None on a card and in TensorFlow's layers, where memory is not
    known."""
    import tensorflow as tf

    host = read_host()
    if not host.instructions or tf.config.get_visible_devices("GPU"):
        return None
    configs = [each.config for each in predictors]
    # A forecast is of the whole process, and what that has is not free any more.
    free_bytes = host.free_bytes + status_sizes().get("VmRSS", 0)
    return Forecaster(configs, inference, host, free_bytes, written_bytes)
