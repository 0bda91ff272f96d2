"""Named runs. Each says its command, its cost and what to expect; `train --recipe NAME` starts from one."""

from typing import Callable, Dict

from cpu3d.config import RunConfig
from cpu3d.data.augment import AugmentConfig
from models.config import UNetConfig


def brats() -> RunConfig:
    """The three regions from all four modalities, whole brain, bfloat16 where the CPU has it.

    ./run.sh train --store STORE --run RUN
    Scores on the real BraTS sets: not verified here.
    """
    return RunConfig()


def demo() -> RunConfig:
    """A run short enough to watch, for the demo's phantoms: a few minutes on 2 cores.

    ./run.sh demo
    """
    return RunConfig(
        epochs=8,
        validate_every=2,
        learning_rate=3e-3,
        warmup_steps=5,
        augment=AugmentConfig(gain=0.05, offset=0.05),
    )


def paper_flair() -> RunConfig:
    """The paper's task: the whole tumour from FLAIR alone, one sigmoid, batch norm, the full grid.

    ./run.sh train --recipe paper-flair --store STORE --run RUN
    The paper reports Dice 0.82 to 0.83 after 25 epochs at batch 16 on the Decathlon's 484 cases: not verified here.
    """
    return RunConfig(
        channels=("FLAIR",),
        regions=("WT",),
        extent="full",
        unet=UNetConfig(norm="batch"),
        batch=1,
        epochs=25,
    )


RECIPES: Dict[str, Callable[[], RunConfig]] = {"brats": brats, "demo": demo, "paper-flair": paper_flair}
