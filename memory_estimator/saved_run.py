"""The job of a run that `train` has written, read from its config.json. Only the fields that an estimate needs."""

from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

from memory_estimator.files import read_json
from memory_estimator.job import ENGINES, Job
from models.config import UNetConfig

SCHEMA = 1
"""Version of the run folder's layout that is understood; `cpu3d.config` writes it."""


def job_of_run(folder: Union[str, Path], auto_engine: str = "itex", engine: Optional[str] = None) -> Job:
    """What training the run in `folder` asks of a host.

    `engine` replaces the run's own; `auto_engine` stands in where the run left it open. The number of cases, or of
    patches, is what follows from the run's store, where this is still there, else unknown.
    Raises ValueError for a folder without config.json, a damaged one, or one of another version.
    """
    path, content = _read(folder)
    try:
        own = auto_engine if content["engine"] == "auto" else content["engine"]
        return _job(content, engine or own)
    except (KeyError, TypeError) as error:
        raise ValueError(f"run config {path} must be complete, got {error!r}; restore it") from None
    except ValueError as error:
        raise ValueError(f"run config {path} must be as `train` wrote it: {error}") from None


def notes_on_run(folder: Union[str, Path]) -> List[str]:
    """What the estimate of a run's job says nothing of, a sentence each. Raises ValueError as `job_of_run`."""
    _, content = _read(folder)
    device, notes = content.get("device", "cpu"), []
    if device != "cpu":
        notes.append(
            f"the run is on {device}, and this is what its steps would take on a CPU, of its host's memory; `train` "
            "says what they take of a card's"
        )
    if content.get("mode") == "patch" or content.get("resolution", 1) != 1:
        notes.append("the run validates on whole volumes of the store, which is not counted; `train` adds it")
    return notes


# --- Private helpers ---


def _read(folder: Union[str, Path]) -> Tuple[Path, Dict[str, Any]]:
    """config.json of a run, and its content."""
    path = Path(folder) / "config.json"
    try:
        content = read_json(path)
    except OSError as error:
        raise ValueError(
            f"run {folder} must hold a config.json, got {error.strerror}; name a folder that `train` has written"
        ) from None
    except ValueError:
        raise ValueError(f"run config {path} must be JSON, got something else; restore it") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"run config {path} must have schema {SCHEMA}, got {schema}; use the version that made it")
    return path, content


def _job(content: Dict[str, Any], engine: str) -> Job:
    if engine not in ENGINES:
        raise ValueError(f"engine must be itex or stock to be estimated, got {engine}; add --engine to choose one")
    unet = content["unet"]
    counts = {name: unet[name] for name in ("channels", "outputs", "filters", "depth") if name in unet}
    batch = content["batch"]
    micro_batch = content.get("micro_batch", batch)  # a run from before there was a choice computes its batch at once
    counts.update({"batch": batch, "micro_batch": micro_batch})
    counts.update({f"grid {axis}": n for axis, n in zip("XYZ", content["grid"])})
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} must be a whole number, got {value!r}; restore the file")
    return Job(
        unet=UNetConfig(**unet),
        shape=tuple(content["grid"]),
        batch=batch,
        micro_batch=micro_batch,
        optimizer=content["optimizer"],
        engine=engine,
        averaged=content["ema"] > 0,
        from_store=True,
        resampled=any(content.get("augment", {}).get(name) for name in ("rotation_deg", "scaling")),
        cases=_training_cases(Path(content["store"]), content.get("fold", "")) * content.get("patches_per_case", 1),
    )


def _training_cases(store: Path, fold: str) -> int:
    """0 where the store is gone or cannot be read: the run's memory does not hang on it.

    A fold holds out one of its parts of the training and validation cases; told as if each case had its own patient.
    """
    try:
        split = read_json(store / "manifest.json")["split"]
        if not fold:
            return len(split["train"])
        part, parts = map(int, fold.split("/"))
        cases = len(split["train"]) + len(split["val"])
        return cases - len(range(part - 1, cases, parts))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0
