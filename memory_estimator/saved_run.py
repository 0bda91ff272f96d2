"""The job of a run that `train` has written, read from its config.json. Only the fields that an estimate needs."""

import json
from pathlib import Path
from typing import Any, Dict, Union

from memory_estimator.job import Job
from models.config import UNetConfig

SCHEMA = 1
"""Version of the run folder's layout that is understood; `cpu3d.config` writes it."""


def job_of_run(folder: Union[str, Path], auto_engine: str = "itex") -> Job:
    """What training the run in `folder` asks of a host, on `auto_engine` where the run left the engine open.

    Raises ValueError for a folder without config.json, a damaged one, or one of another version.
    """
    path = Path(folder) / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"run {folder} must hold a config.json, got {error.strerror}; name a folder that `train` has written"
        ) from None
    except ValueError:
        raise ValueError(f"run config {path} must be JSON, got something else; restore it") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"run config {path} must have schema {SCHEMA}, got {schema}; use the version that made it")
    try:
        return _job(content, auto_engine)
    except (KeyError, TypeError) as error:
        raise ValueError(f"run config {path} must be complete, got {error!r}; restore it") from None


# --- Private helpers ---


def _job(content: Dict[str, Any], auto_engine: str) -> Job:
    engine = content["engine"]
    if engine == "stock-no-onednn":
        raise ValueError(f"engine must be itex or stock to be estimated, got {engine}; nothing is known of it")
    return Job(
        unet=UNetConfig(**content["unet"]),
        shape=tuple(content["grid"]),
        batch=content["batch"],
        optimizer=content["optimizer"],
        engine=auto_engine if engine == "auto" else engine,
        averaged=content["ema"] > 0,
        from_store=True,
    )
