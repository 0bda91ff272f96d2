"""A part of the benchmark in a process of its own: nothing that another part read or compiled is in it.

python -m cpu3d.bench.data.worker MODULE '{"rounds": 5, ...}'     prints one JSON line
"""

import importlib
import json
import sys
from typing import Any, Dict, Optional

from cpu3d.bench.data.disk_cap import join
from cpu3d.bench.harness import last_json_line


def in_fresh_process(module: str, request: Dict[str, Any], cap: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """What `work(request, bucket)` of cpu3d.bench.data.`module` returns in a new process, under a disk cap if any."""
    content = json.dumps({"request": request, "cap": cap}, default=str)
    return last_json_line([sys.executable, "-m", "cpu3d.bench.data.worker", module, content], f"bench data {module}")


def main() -> None:
    module, content = sys.argv[1], json.loads(sys.argv[2])
    bucket = join(content["cap"])
    result = importlib.import_module(f"cpu3d.bench.data.{module}").work(content["request"], bucket)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
