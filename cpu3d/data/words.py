"""Numbers as a message tells them."""

from typing import Sequence, Sized, Union


def count(items: Union[int, Sized], what: str) -> str:
    """Such as "3 cases" or "1 case", of a number or of what can be counted."""
    number = items if isinstance(items, int) else len(items)
    return f"{number} {what}{'' if number == 1 else 's'}"


def by(shape: Sequence[int]) -> str:
    """Such as "240x240x155"."""
    return "x".join(map(str, shape))
