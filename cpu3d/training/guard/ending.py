"""What a process ends with, told by the exception that ends it."""

from typing import Optional, Tuple


def how_it_ended(error: Optional[BaseException]) -> Tuple[str, int]:
    """(reason, exit code) of a process that ends by this exception, as the command line has it."""
    if error is None:
        return "finished", 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return "finished" if code == 0 else f"exit code {code}", code
    default = 130 if isinstance(error, KeyboardInterrupt) else 1
    told = str(error).strip().splitlines()
    first = told[0][:400] if told else ""
    name = type(error).__name__
    reason = first if hasattr(error, "exit_code") else ": ".join(filter(None, (name, first)))
    return reason or name, getattr(error, "exit_code", default)
