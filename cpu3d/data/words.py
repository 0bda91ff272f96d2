"""Numbers as a message tells them."""

from typing import Sequence, Sized, Union


def count(items: Union[int, Sized], what: str) -> str:
    """Such as "3 cases" or "1 case", of a number or of what can be counted."""
    number = items if isinstance(items, int) else len(items)
    return f"{number} {what}{'' if number == 1 else 's'}"


def by(shape: Sequence[int], sign: str = "x") -> str:
    """Such as "240x240x155", or with " x " between, or " " as on a command line."""
    return sign.join(map(str, shape))
