"""What a command line prints to: streams that lack a letter, and readers that go away."""

import contextlib
import io
import os
import sys
from typing import Callable

READER_GONE = 1  # the exit code


def printing(command: Callable[[], int]) -> int:
    """Run `command` and return its exit code, whatever it prints to.

    A letter that the encoding of stdout or stderr lacks is replaced by "?": a terminal that is not
    UTF-8 stops no command. If the reader of our output goes away, as `head` does after its lines,
    the rest is discarded and the code is `READER_GONE`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # and not a caller's own stream, or none
            with contextlib.suppress(ValueError):
                stream.reconfigure(errors="replace")
    try:
        try:
            return command()
        finally:
            # A reader that has gone away is noticed here, also after --help, and not when Python
            # ends.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError, OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return READER_GONE
