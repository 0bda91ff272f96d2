"""Named runs. Each says its command, its cost and what to expect; `train --recipe NAME` starts from one.

What a recipe asks of a host, its network and batch, stands in `memory_estimator.job`, so that
`./run.sh estimate --recipe NAME` answers without the trainer. "Predicted" below is its answer with 387 training cases,
those of the Decathlon's 484 that a split of 8 1 1 leaves, for 2 cores of an AMD EPYC (Zen 5, AVX512_BF16) with
`--calibration avx512_bf16 --threads 2`; validation comes on top.
"""

from typing import Any, Callable, Dict

from cpu3d.data.augment import AugmentConfig
from cpu3d.settings import RunConfig
from memory_estimator.job import JOBS


def brats_regions() -> RunConfig:
    """The three regions from all four modalities, whole brains; the default.

    ./run.sh train --store STORE --run RUN
    Cost: predicted 3.4 GiB, 2.4 s a volume in bfloat16, 15 minutes an epoch, 26 h in all.
    Score: on real data not verified here. For context: nnU-Net, on patches, has a mean Dice of 91.2 over the five folds
    of BraTS 2021 (MIC-DKFZ/nnUNet, documentation/resenc_presets.md).
    """
    return _run("brats-regions")


def demo() -> RunConfig:
    """A run short enough to watch, on the demo's phantoms.

    ./run.sh demo
    Cost: measured 3.4 GiB and 149 s for its 64 steps, on 2 cores of an AMD EPYC (Zen 5). `demo` cuts them to 4 minutes,
    and never below the first validation: 24 steps.
    Score: measured Dice WT 0.92, TC 0.94, ET 0.78 on two untouched phantoms, which says nothing of real tumours; of 24
    steps WT 0.91, of 16 0.86.
    """
    return _run(
        "demo",
        epochs=8,
        validate_every=3,
        learning_rate=3e-3,
        warmup_steps=5,
        augment=AugmentConfig(gain=0.05, offset=0.05),
    )


def paper_flair() -> RunConfig:
    """The paper's task with a network of today: the whole tumour from FLAIR alone, one sigmoid, the full grid.

    ./run.sh train --recipe paper-flair --store STORE --run RUN
    Cost: predicted 6.3 GiB, 5.3 s a volume in bfloat16, 34 minutes an epoch, 14 h in all.
    Score: the paper (Ojika et al. 2020) reports Dice 0.82 to 0.83 after 25 epochs at batch 16 on the Decathlon's 484
    cases: not verified here.
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
    paper, in hundreds of GiB.
    Cost: predicted 23 GiB under policy balanced, 17 GiB under lean; 110 s a volume in float32, 12 h an epoch. In
    bfloat16 under lean one step was measured here: 10.6 GiB, 91 s a volume. The paper's memory was close to 1 TB, its
    time 30 s a volume on 80 cores: not verified here.
    Score: the paper's, as for paper-flair: not verified here.
    """
    return _run("paper-2020", channels=("FLAIR",), regions=("WT",), extent="full", epochs=25)


def gpu_patch() -> RunConfig:
    """What GPU users do: the regions, loss and schedule of brats-regions on patches, batch 2, 32 filters.

    ./run.sh setup --gpu
    ./run.sh train --recipe gpu-patch --store STORE --run RUN
    The patch is the largest that the card's free memory trains; --patch 128 128 128 is nnU-Net's for BraTS.
    Cost: assumed 3.5 GiB of the card at 128 x 128 x 128, for the two patches are computed one after the other; its
    time is not predicted.
    Score: not verified here. For context: nnU-Net's, batch 2 of such patches with its own network and augmentation, is
    a mean Dice of 91.2 over the five folds of BraTS 2021, in 7.7 GB and 9 h on an A100 (MIC-DKFZ/nnUNet,
    documentation/resenc_presets.md).
    """
    return _run("gpu-patch", mode="patch", device="gpu:0")


RECIPES: Dict[str, Callable[[], RunConfig]] = {
    "demo": demo,
    "paper-flair": paper_flair,
    "paper-2020": paper_2020,
    "brats-regions": brats_regions,
    "gpu-patch": gpu_patch,
}


def overview() -> str:
    """A line for each recipe, for the end of a help page."""
    lines = [f"  {name:13}  {recipe.__doc__.splitlines()[0]}" for name, recipe in RECIPES.items()]
    return "\n".join(["recipes (their cost and expected scores are in cpu3d/recipes.py):", *lines])


# --- Private helpers ---


def _run(name: str, **settings: Any) -> RunConfig:
    """A run of the recipe's job; its dtype and grid follow from host and store."""
    job = JOBS[name]
    return RunConfig(unet=job.unet, batch=job.batch, micro_batch=job.micro_batch, optimizer=job.optimizer, **settings)
