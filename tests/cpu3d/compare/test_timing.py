from cpu3d.compare.timing import FOLDER, computing_seconds, forget, step_seconds
from cpu3d.training.checkpoint_history import checkpoints

PLAN = [
    {"name": "whole", "options": ["--filters", "2"], "steps": None, "warmup_steps": 10},
    {"name": "patch", "options": ["--mode", "patch", "--patch", "8", "8", "8"], "steps": None, "warmup_steps": 0},
]

THERE_AND_BACK = ["train whole-timed0", "train patch-timed0", "train patch-timed1", "train whole-timed1"]


def test_a_step_is_what_the_later_half_computes():
    log = [{"event": "start"}, *({"event": "step", "step_s": s, "wait_s": w} for s, w in [(9, 1), (8, 0), (3, 1)])]
    assert computing_seconds(log) == [8, 2]
    assert computing_seconds([{"event": "step", "step_s": 2.0}]) == [2.0]


def test_variants_are_timed_there_and_back(stage, tmp_path):
    assert step_seconds(PLAN, tmp_path / "store", tmp_path) == {"whole": 2.0, "patch": 0.5}
    assert stage.calls() == THERE_AND_BACK
    assert step_seconds(PLAN, tmp_path / "store", tmp_path) == {"whole": 2.0, "patch": 0.5}
    assert stage.calls() == [], "those that are whole are kept"


def test_what_was_cut_off_or_half_deleted_is_timed_anew(stage, tmp_path):
    step_seconds(PLAN, tmp_path / "store", tmp_path)
    stage.calls()
    for path in ("whole-timed0/log.jsonl", "patch-timed1/config.json"):
        path = tmp_path / FOLDER / path
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    for path in checkpoints(tmp_path / FOLDER / "patch-timed0"):
        path.unlink()
    assert step_seconds(PLAN, tmp_path / "store", tmp_path) == {"whole": 2.0, "patch": 0.5}
    assert stage.calls() == THERE_AND_BACK[:3]
    forget(tmp_path)
    assert not (tmp_path / FOLDER).exists()
