"""Train a 3D U-Net on the whole volumes of a store, or on patches of them.

    ./run.sh train --store store --run runs/first
    ./run.sh train --store store --run runs/first --dry-run
    ./run.sh train --store store --run runs/flair --recipe paper-flair --epochs 25
    ./run.sh train --store store --run runs/patches --mode patch --patch 96 96 96
    ./run.sh train --store store --run runs/fold-2 --fold 2/5
    ./run.sh train --store store --run runs/folds --folds 5
    ./run.sh train --store store --run runs/second --init runs/first --freeze encoder

The same command continues an interrupted run; more --epochs, --steps or --budget-minutes extend a
finished one. `launch` starts several processes that train one run together. If TF_CONFIG is set, as
by Kubernetes, this process is one of them.

--init starts from the weights of another run of the same network; image channels and regions are
matched by name, and what is new is fresh (docs/training.md).

--folds trains all folds one after the other, each by a process of its own; scores every case once,
by the fold that has not seen it; decides post-processing on all of them; and writes
RUN/report.html. `predict --run RUN` and `evaluate --run RUN` then take the folds together. It uses
the last weights of each fold, as the best ones are chosen by the cases that are to be scored."""

from typing import Any, Dict

from cpu3d.errors import InputError
from cpu3d.experiments.folds import show_folds, train_folds
from cpu3d.inference.postprocessing.run_rules import choose_rules_after_training
from cpu3d.settings import TRAIN_OPTIONS, TrainOptions
from cpu3d.training.train import show_plan, train

OPTIONS = TRAIN_OPTIONS


def run(options: TrainOptions, settings: Dict[str, Any]) -> int:
    """Carry out `train`: one run, or all folds."""
    if options.json and not options.dry_run:
        raise InputError("--json must come with --dry-run, got it alone; add --dry-run")
    if options.dry_run:
        show = show_folds if options.folds else show_plan
        show(options, settings)
        return 0
    more = {"settings": settings, "force": options.force, "mlflow": options.mlflow}
    if options.folds:
        train_folds(options.store, options.run, options.folds, **more)
    else:
        train(options.store, options.run, on_finished=choose_rules_after_training, **more)
    return 0
