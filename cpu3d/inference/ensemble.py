"""Predictors of trained runs on one device, several as one: their probabilities are averaged, as in
nnU-Net.

predictor = Ensemble(trained_predictors(runs, "best", Inference(window=(96, 96, 96))))
"""

from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np

from cpu3d.data.manifest import CaseRecord
from cpu3d.host.apply import set_up
from cpu3d.host.gpu import HostGpus, pick_device, why_no_card
from cpu3d.inference.answers import Answers
from cpu3d.inference.runs import Inference, applied, check_inference, config_of_weights, window_of
from cpu3d.settings import AUTO, RunConfig
from cpu3d.util.progress import say


def trained_predictors(runs: Sequence[Path], weights: str, inference: Inference) -> List[Any]:
    """The predictor of each run, all on the device of `inference`, for which the host is set up.
    Raises InputError, before TensorFlow is imported, as `check_inference` and for a device that the
    host lacks; and as `load_predictor`."""
    # Of the weights, as coarse steps have another network than full ones.
    configs = [config_of_weights(run, weights) for run in runs]
    for config in configs:
        check_inference(config, inference)
    # A device left open is a card only if every run slides a window: a whole volume in one pass is
    # for a CPU's memory.
    slides = all(window_of(config, inference) for config in configs)
    mode = "patch" if slides else "whole"
    requested = None if inference.device == AUTO else inference.device
    gpus = HostGpus()
    say(*why_no_card(requested, mode, gpus))
    set_up(device=pick_device(requested, mode, gpus))
    from cpu3d.inference.predictor import load_predictor  # imports TensorFlow, so not before

    return [load_predictor(run, weights, inference) for run in runs]


class Ensemble:
    """The mean of predictors, with the interface of each. Their networks all stay in memory."""

    def __init__(self, predictors: Sequence[Any]):
        first = predictors[0]
        self.predictors = tuple(predictors)
        self.channels = first.channels
        self.normalisation_of = first.normalisation_of
        self.labels = first.labels
        self.regions = first.regions
        self.target_spacing_mm = first.target_spacing_mm
        # All that any of the runs needs: they may have learnt from different channels.
        needed = {name for predictor in predictors for name in predictor.inputs}
        self.inputs = tuple(name for name in first.channels if name in needed)

    def probabilities(
        self,
        image: np.ndarray,
        record: CaseRecord,
        channels: Sequence[str] = (),
        in_windows: bool = False,
    ) -> Answers:
        """The mean of the runs' probabilities, float32 (X, Y, Z, R), on the full grid; equal ones
        stay as they are."""
        first, *others = [
            predictor.probabilities(image, record, channels, in_windows)
            for predictor in self.predictors
        ]

        def mean_of(region: int, rows: slice) -> np.ndarray:
            mean = first[rows, ..., region]
            for count, answers in enumerate(others, start=2):
                mean = mean + (answers[rows, ..., region] - mean) / np.float32(count)
            return mean

        return Answers(record.scored_shape, len(self.regions), mean_of)


def origin(
    runs: Sequence[Path], configs: Sequence[RunConfig], predictors: Sequence[Any]
) -> Dict[str, Any]:
    """The origin of an answer, as it is written beside it: the run's folder, its fold, its weights,
    and how the network was applied; for several runs a list of these, "runs"."""
    origins = [
        {
            "run": str(run),
            "fold": config.fold,
            "weights_sha256": predictor.weights_sha256,
            "inference": applied(config, predictor.inference),
        }
        for run, config, predictor in zip(runs, configs, predictors)
    ]
    return origins[0] if len(origins) == 1 else {"runs": origins}
