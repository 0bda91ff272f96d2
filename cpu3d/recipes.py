"""Named runs. Each says its command, its cost and what to expect; `train --recipe NAME` starts from one.

What a recipe asks of a host, its network and batch, stands in `memory_estimator.recipes`, so that
`./run.sh estimate --recipe NAME` answers without the trainer.
"""

from typing import Any, Callable, Dict

from cpu3d.config import RunConfig
from cpu3d.data.augment import AugmentConfig
from memory_estimator.recipes import JOBS


def brats() -> RunConfig:
    """The three regions from all four modalities, whole brain, bfloat16 where the CPU has it.

    ./run.sh train --store STORE --run RUN
    Scores on the real BraTS sets: not verified here.
    """
    return _run("brats")


def demo() -> RunConfig:
    """A run short enough to watch, for the demo's phantoms: a few minutes on 2 cores.

    ./run.sh demo
    """
    return _run(
        "demo",
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
    return _run(
        "paper-flair",
        channels=("FLAIR",),
        regions=("WT",),
        extent="full",
        epochs=25,
    )


def paper_2020() -> RunConfig:
    """The paper's job: Cicek's wide network, batch 16 computed one volume at a time, FLAIR, batch norm, 25 epochs.

    ./run.sh estimate --recipe paper-2020 --host-memory 1.5TiB
    ./run.sh train --recipe paper-2020 --dtype float32 --store STORE --run RUN
    The paper crops to 240 x 240 x 144, and so does the estimate; `train` sees the store's whole grid, for BraTS 240 x
    240 x 160. Batch norm's statistics are then of one volume; with --micro-batch 16 they are of the batch, as in the
    paper, in hundreds of GiB. The paper's memory was close to 1 TB, its time 30 s a volume on 80 cores: not verified
    here.
    """
    return _run("paper-2020", channels=("FLAIR",), regions=("WT",), extent="full", epochs=25)


RECIPES: Dict[str, Callable[[], RunConfig]] = {
    "brats": brats,
    "demo": demo,
    "paper-flair": paper_flair,
    "paper-2020": paper_2020,
}

# --- Private helpers ---


def _run(name: str, **settings: Any) -> RunConfig:
    """A run of the recipe's job; its dtype and grid follow from host and store."""
    job = JOBS[name]
    return RunConfig(unet=job.unet, batch=job.batch, micro_batch=job.micro_batch, optimizer=job.optimizer, **settings)
