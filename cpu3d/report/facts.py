"""What a run was, in plain words with units: the rows at the top of its page, and of that of folds.

rows = described(load_config(run), starts[-1])     # ("a step sees", "whole volumes, ...")
"""

from typing import Any, List, Mapping, Tuple

from cpu3d.data.cases.resample import in_mm
from cpu3d.settings import RunConfig
from memory_estimator.common.units import by, format_bytes
from models.strides import axes_text, strides_text

HOST = {  # in the log -> on the page
    "cpu": "CPU",
    "cores": "cores",
    "memory_bytes": "memory",
    "instructions": "instruction set",
}
NOT_KNOWN = "-"  # in logs of earlier versions


def described(config: RunConfig, start: Mapping[str, Any]) -> List[Tuple[str, str]]:
    """Name and value of what distinguishes a run, by its settings and what its last start has
    logged; "-" stands for what is logged alone, in a run that was not started."""
    batch_name = "volumes a step"
    if config.is_patch:
        batch_name = "patches a step"
    return [
        ("network", _network(config, start)),
        ("a step sees", _seen(config)),
        ("coarse steps", _coarse(config)),
        (batch_name, _batch(config, start)),
        ("loss", config.loss),
        ("optimizer", _optimizer(config)),
        ("split", f"hash {config.split_hash}"),
        ("computed in", str(start.get("precision", NOT_KNOWN))),
        ("memory policy", str(start.get("policy", NOT_KNOWN))),
        ("engine", str(start.get("engine", NOT_KNOWN))),
        ("device", str(start.get("device", config.device))),
    ]


def host_rows(start: Mapping[str, Any]) -> List[Tuple[str, str]]:
    """Name and value of the host of an attempt, as far as its start has logged them."""
    host = start.get("host", {})
    rows = []
    for key, name in HOST.items():
        if key in host:
            value = host[key]
            words = str(value)
            if key.endswith("_bytes"):
                words = format_bytes(value)
            rows.append((name, words))
    threads = start.get("threads", {}).get("TF_NUM_INTRAOP_THREADS")
    if threads:
        rows.append(("threads of an operation", threads))
    return rows


def _network(config: RunConfig, start: Mapping[str, Any]) -> str:
    unet = config.unet
    words = f"{unet.network}, {unet.depth} levels, {unet.filters} filters, {unet.norm} norm"
    if unet.strides:
        words += f", strides {strides_text(unet.strides)}"
    if "parameters" in start:
        words += f", {start['parameters']:,} weights"
    return words


def _seen(config: RunConfig) -> str:
    """The grid of a step, and the size of its voxels."""
    kind = "a whole volume"
    if config.is_patch:
        kind = "a patch"
    words = f"{kind} of {by(config.grid, ' x ')} voxels"
    spacing_mm = config.target_spacing_mm or config.spacing_mm
    if spacing_mm:
        shares = config.resolution_by_axis
        seen_mm = [length / share for length, share in zip(spacing_mm, shares)]
        words += f" of {in_mm(seen_mm)}"
    if config.resolution < 1:
        axes = axes_text(config.coarse_stride)
        words += f", at resolution {config.resolution:g} along {axes}"
    return words


def _coarse(config: RunConfig) -> str:
    if not config.coarse_steps:
        return "none"
    axes = axes_text(config.coarse_stride)
    return f"the first {config.coarse_steps:,}, on {by(config.coarse_grid, ' x ')}: {axes} halved"


def _batch(config: RunConfig, start: Mapping[str, Any]) -> str:
    micro = start.get("micro_batch", config.micro)
    words = f"{config.batch}, {micro} at a time"
    workers = start.get("workers", 1)
    if workers > 1:
        words += f", of {workers} workers"
    return words


def _optimizer(config: RunConfig) -> str:
    if config.schedule == "constant":
        return f"{config.optimizer}, constant rate {config.peak_rate:g}"
    return f"{config.optimizer}, rate {config.peak_rate:g} at its peak, {config.schedule} decay"
