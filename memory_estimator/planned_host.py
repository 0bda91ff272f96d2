"""The host that an estimate is for: this one, or one that its memory or its constants describe."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import List

from memory_estimator.accuracy import Accuracy, load_accuracy
from memory_estimator.calibration import HostConstants, find_constants, load_constants
from memory_estimator.common.units import parse_bytes
from memory_estimator.estimate import Estimate
from memory_estimator.host import Host, read_host
from memory_estimator.installed import as_typed, has_tensorflow, installed_versions
from models.native.instruction_sets import BFLOAT16_PRODUCTS


@dataclass(frozen=True)
class PlannedHost:
    """The host that an estimate is for."""

    calibration: str  # file or name of its constants; "" for those of this host
    memory: str  # such as "1.5TiB"; "" for what is free on this host

    @functools.cached_property
    def here(self) -> Host:
        """This host, which is not read if the one that is meant is described."""
        return read_host()

    @functools.cached_property
    def memory_bytes(self) -> int:
        """Its memory; 0 if that is not described. Raises ValueError for what is no size."""
        return parse_bytes(self.memory) if self.memory else 0

    @functools.cached_property
    def accuracy(self) -> Accuracy:
        """The errors of estimates. A host that is described has no engines installed here: the
        recorded ones are assumed."""
        if self.calibration or self.memory:
            return load_accuracy(versions=None)
        return load_accuracy(versions=installed_versions())

    @functools.cached_property
    def constants(self) -> HostConstants:
        """Those of `calibration`, else of what computes on this host, or on one with its CPU that
        is set up as it should be: native operations run there."""
        if self.calibration:
            return load_constants(self.calibration)
        if not self._assumes_native_operations:
            return find_constants(self.here)
        described = dataclasses.replace(self.here, is_here=False)
        if described.instructions:
            return find_constants(described)
        return load_constants("avx2")

    @property
    def best_dtype(self) -> str:
        """The compute dtype that `train` takes there by itself."""
        if not self.calibration and not self._assumes_native_operations:
            return self.here.best_dtype
        is_fast = self.constants.instructions in BFLOAT16_PRODUCTS
        return "bfloat16" if is_fast else "float32"

    def assumptions(self, predicted: Estimate) -> List[str]:
        """Notes on what an estimate assumes."""
        notes = []
        constants = predicted.constants
        if not constants.instructions:
            why = self.here.native.why
            rough = "TensorFlow's layers compute here, so memory and time are rough"
            notes.append(f"{rough}; no native operations: {why}")
        elif not self.calibration and self._assumes_native_operations:
            name = constants.instructions
            setup = as_typed("./run.sh setup")
            notes.append(
                f"assumes that native operations compute, with {name}, as `{setup}` builds them"
            )
        threads = predicted.job.threads
        if constants.instructions and threads not in (1, constants.threads):
            share = f"{threads} threads share the work of an operation in pieces"
            busy = f"which keep them busy {predicted.busy_share:.0%} of its time"
            notes.append(f"assumes that {share}, {busy}")
        if predicted.kind and predicted.job.engine not in predicted.accuracy.versions:
            notes.append(f"assumes the recorded engine, {' or '.join(predicted.kind.versions)}")
        return notes

    @property
    def _assumes_native_operations(self) -> bool:
        """Whether native operations are assumed, and not asked for: on a host that is described,
        and here before TensorFlow is installed, as the set-up builds both."""
        return bool(self.memory) or not (has_tensorflow() or self.here.instructions)
