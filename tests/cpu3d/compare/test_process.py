import json
import sys

from cpu3d.compare import process

SAYS = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"


def test_what_is_left_over_from_a_cluster_is_not_told_to_a_run(tmp_path, monkeypatch):
    """A run under it would wait for workers that nobody has started."""
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}')
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("OF_SOMETHING_ELSE", "kept")
    monkeypatch.setattr(process, "PROGRAM", (sys.executable, "-c", SAYS))
    process.call([str(tmp_path / "environ")], tmp_path / "log", "a run")
    environ = json.loads((tmp_path / "environ").read_text())
    assert environ["OF_SOMETHING_ELSE"] == "kept"
    assert not {"TF_CONFIG", "HOROVOD_RANK"} & set(environ)
