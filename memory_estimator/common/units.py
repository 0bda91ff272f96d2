"""Amounts of memory and time, and shapes, as people write and read them; bytes and seconds
everywhere else."""

import re
from typing import Optional, Sequence

UNITS = {
    "B": 1,
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGTP", 1)},
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("kMGTP", 1)},
}
"""Unit of memory -> bytes."""

GIB = UNITS["GiB"]  # a divisor for figures with a unit of their own, as on an axis


def parse_bytes(text: str) -> int:
    """Bytes of an amount such as "1.5TiB" or "384 GB". Raises ValueError unless it is a positive
    number with a unit. A bare "64G" is refused rather than guessed at: it is 7 % more in GiB than
    in GB, which decides whether a job fits."""
    units = {name.lower(): size for name, size in UNITS.items()}
    match = re.fullmatch(r"(\d{1,18})(?:\.(\d{1,18}))?\s*([a-z]+)", text.strip().lower(), re.ASCII)
    size = 0
    if match and match[3] in units:
        fraction = match[2] or ""
        size = int(match[1] + fraction) * units[match[3]] // 10 ** len(fraction)
    if size < 1:
        rule = f"memory must be a positive number, of 18 digits at most, in {', '.join(UNITS)}"
        raise ValueError(f"{rule}, got {shortened(text)!r}; write it like 384GiB or 1.5TiB")
    return size


def format_bytes(size_bytes: Optional[float]) -> str:
    """For reading: the unit that leaves no more than four digits before the point; "-" for None.
    Keeps the sign."""
    if size_bytes is None:
        return "-"
    size = abs(size_bytes)
    for unit, below, digits in (("KiB", 2**20, 0), ("MiB", 2**30, 0), ("GiB", 2**40, 2)):
        if size < below:
            return f"{size_bytes / UNITS[unit]:.{digits}f} {unit}"
    return f"{size_bytes / UNITS['TiB']:.2f} TiB"


def format_seconds(seconds: Optional[float]) -> str:
    """For reading: seconds below two minutes, then minutes, hours, and days from the third on; "-"
    for None."""
    if seconds is None:
        return "-"
    for unit, size, below in (("s", 1, 120), ("min", 60, 120 * 60), ("h", 3600, 72 * 3600)):
        if seconds < below:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86400:,.1f} days"


def shortened(text: str) -> str:
    """A text in an error's message, of 60 letters at most."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def counted(number: int, noun: str) -> str:
    """Such as "3 cases" or "1 case"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def by(numbers: Sequence[int], sign: str = "x") -> str:
    """Such as "240x240x155", or with " x " between, or " " as on a command line."""
    return sign.join(map(str, numbers))
