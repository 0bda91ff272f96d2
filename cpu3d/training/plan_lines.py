"""What a run is about to do, as lines to print before it starts."""

from typing import List

from cpu3d.data.words import by
from cpu3d.training.fit import Fit
from cpu3d.training.learner import parameter_count
from memory_estimator.job import statistics_note
from models.layer_plan import training_flops


def plan_lines(fit: Fit) -> List[str]:
    """What is about to happen, a line each."""
    config, manifest = fit.config, fit.store.manifest
    unet, flops = config.unet, training_flops(config.unet, config.grid, config.batch)
    done = f", continued after step {fit.step}" if fit.step else ""
    fold = f", fold {config.fold}" if config.fold else ""
    workers = f", {fit.workers} workers" if fit.workers > 1 else ""
    lines = [
        *fit.warnings,
        f"store: {fit.store.folder}, {len(manifest.cases)} cases, split {config.split_hash}{fold}: "
        + ", ".join(f"{len(ids)} {name}" for name, ids in manifest.split.items()),
        f"{_seen(fit)}, {', '.join(config.channels)} -> {', '.join(config.regions)}",
        f"network: {unet.network}, {unet.depth} levels, {unet.filters} filters, {unet.norm} norm, {unet.dtype}, "
        f"policy {unet.policy}, {parameter_count(fit.learner.model):,} parameters, "
        f"{flops / 1e9:,.0f} GFLOP a step",
        f"run: {fit.folder}, {_length(fit)} at batch {config.batch}"
        f"{f', {config.micro} at a time' if config.parts > 1 else ''}{workers}{done}",
    ]
    lines.append(f"reads: {fit.feeds.reading.plan.reason}")
    note = statistics_note(unet.norm, config.batch, config.micro)
    if note:
        lines.append(f"note: {note}")
    if config.augment.resamples:
        lines.append(f"rotation and scaling: {_resampling(fit)}")
    if not fit.val_cases:
        lines.append("no validation cases in this split: the last weights count as the best")
    return lines


# --- Private helpers ---


def _seen(fit: Fit) -> str:
    """What a step sees, in words."""
    config, volume, seen = fit.config, by(fit.feeds.volume_shape, " x "), by(fit.config.grid, " x ")
    if config.is_patch:
        return (
            f"patches: {seen} of {volume} ({config.extent}), {config.patches_per_case} of a case an epoch, "
            f"{config.foreground:.0%} around labels, on {config.device}"
        )
    at = f", at {config.resolution:g} of the resolution of {volume}" if config.resolution < 1 else ""
    return f"volumes: {seen} ({config.extent}){at}"


def _resampling(fit: Fit) -> str:
    """What rotation and scaling cost; of volumes it is measured, which takes a moment."""
    if fit.config.is_patch:
        return "computed in the step"
    return f"{fit.feeds.resampling_cost_s():.2f} s a volume, while the step before runs"


def _length(fit: Fit) -> str:
    if fit.config.steps:
        return f"{fit.steps} steps, {fit.steps_per_epoch} an epoch"
    cut = f", cut to {fit.config.budget_minutes:g} minutes" if fit.config.budget_minutes else ""
    return f"{fit.config.epochs} epochs of {fit.steps_per_epoch} steps{cut}"
