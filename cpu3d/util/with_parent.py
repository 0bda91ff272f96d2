"""Run a command that gets SIGTERM when the process that started it ends, however that one ends.

    python with_parent.py PARENT_PID COMMAND ...

The command takes this process's place and gets SIGTERM when its parent has died, so that a training whose caller
was killed saves and ends. On systems other than Linux it is run as it is.
"""

import ctypes
import os
import signal
import sys
from typing import Sequence

PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h. What it sets outlives the exec."""


def main(parent: int, command: Sequence[str]) -> None:
    """Become `command`; does not return. Ends with code 1 where `parent` has died before it could be watched."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)
    os.execv(command[0], list(command))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
