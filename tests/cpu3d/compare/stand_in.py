"""Stands in for `python -m cpu3d` where a test is about who is called when: copies a run that is there.

stand_in.py TEMPLATE train|evaluate ...: train copies the template without its scores, evaluate its scores. Every call
is added to TEMPLATE/../calls.txt. A file TEMPLATE/../fail makes train fail; a file "wait" makes it run until SIGINT,
which it notes in "told" a moment later, as a step takes its time.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def main(template: Path, command: str, *options: str) -> int:
    around, run = template.parent, Path(options[options.index("--run") + 1])
    with (around / "calls.txt").open("a") as file:
        file.write(f"{command} {run.name}\n")
    if command == "evaluate":
        shutil.copytree(template / "evaluation", run / "evaluation", dirs_exist_ok=True)
        (run / "evaluation" / "scores.json").touch()
        return 0
    if (around / "fail").exists():
        print("error: loss must be finite, got nan at step 3", file=sys.stderr)
        return 2
    if (around / "wait").exists():
        told = []
        signal.signal(signal.SIGINT, lambda *_: told.append(1))
        (around / "ready").write_text(str(os.getpgid(0)))
        (around / "told-to-wait").touch()
        while not told:
            time.sleep(0.02)
        time.sleep(0.2)
        (around / "told").write_text(str(len(told)))
        return 130
    shutil.copytree(template, run, ignore=shutil.ignore_patterns("evaluation"))
    config = json.loads((run / "config.json").read_text())
    config["steps"] = int(options[options.index("--steps") + 1])
    config["seed"] = int(options[options.index("--seed") + 1])
    (run / "config.json").write_text(json.dumps(config))
    end = {"event": "end", "reason": "finished", "step": config["steps"], "seconds": 36.0, "peak_rss_bytes": 2**31}
    with (run / "log.jsonl").open("a") as file:
        file.write(json.dumps(end) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
