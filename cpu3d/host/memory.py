"""How much memory this process has held at most."""

import resource
from pathlib import Path


def peak_rss_bytes() -> int:
    """The process's largest resident set so far (VmHWM), mapped file pages included."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
