"""What a command line prints to: streams that lack a letter, and readers that go away."""

import contextlib
import io
import os
import sys
from typing import Callable

READER_GONE = 1  # the exit code


def use_utf8() -> None:
    """Start this program again in Python's UTF-8 mode, if the locale has another encoding.

    Else a file's name with other letters would go into JSON as half surrogates, and no other host
    would find that file. What is printed stays in the locale's encoding.
    """
    if sys.getfilesystemencoding() == "utf-8" or os.environ.get("PYTHONUTF8") == "1":
        return
    words = getattr(sys, "orig_argv", ())[1:]  # Python 3.9 has none
    if not words or not sys.executable:  # no program, but a prompt or another program's Python
        return
    os.environ["PYTHONUTF8"] = "1"
    if sys.stdout is not None:
        os.environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding}:replace")
    os.execv(sys.executable, [sys.executable, *words])


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
