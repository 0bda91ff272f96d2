"""Made-up studies, for what judges and shows them."""

from cpu3d.compare.study.learning_rates import Trial
from cpu3d.compare.study.result import Arm, SeedRun, Study

CASES = 4

ABOUT = {
    "title": "Made up",
    "data": "made up",
    "split": "test",
    "epochs": 12,
    "cases": {"train": 20, "val": 4, "test": CASES},
    "search_share": 0.25,
    "optimizer": "adam",
    "search_factors": [0.5, 1.0, 2.0],
    "learning_rates": [],
    "network": "unet3d, 3 levels, 4 filters, instance norm, float32",
    "host": {"cpu": "made up", "cores": 2},
}


def seed_run(seed, dice, *, regions=("WT",), step_s=1.0, train_s=60.0):
    """`dice`: that of the first case; the others follow at -0.01 each."""
    by_case = tuple(dice - 0.01 * number for number in range(CASES))
    return SeedRun(
        seed=seed,
        val_dice=dice,
        dice=dict.fromkeys(regions, by_case),
        hd95_mm=dict.fromkeys(regions, (10 * (1 - dice),) * CASES),
        step_s=step_s,
        train_s=train_s,
        peak_bytes=2**30,
        predict_s=0.1,
    )


def arm(resolution, seeds, *, batch=1, rate=0.002, trials=None, diverged=(), **more):
    """`seeds`: Dice of each seed's first case."""
    if trials is None:
        trials = (Trial(0.001, 0.5), Trial(0.002, 0.6), Trial(0.004, 0.5))
    n = round(48 * resolution)
    runs = tuple(seed_run(number, dice, **more) for number, dice in enumerate(seeds))
    return Arm(resolution, batch, (n, n, n), 240 // batch, 60 // batch, 0.002, rate, tuple(trials), runs, diverged)


def study(*arms, **about):
    return Study(arms, {**ABOUT, **about})
