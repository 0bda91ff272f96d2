"""Settings as dataclasses: one declaration of a field makes its command-line option and its check.

    @dataclass(frozen=True)
    class Options:
        store: Path = option(help="store that `prepare` has written", metavar="DIR")    # no default: required
        batch: int = option(1, help="volumes a step", at_least=1, metavar="N")
        flip: bool = option(True, help="no mirroring")                                  # --no-flip

    add_options(parser, Options)
    options = from_args(Options, parser.parse_args(argv))

A command is a module with `OPTIONS`, a dataclass for each argument of its `run`. A tuple of
dataclasses there is a dict of the options that were given; the others come from elsewhere, as from
a recipe.

A field's annotation gives the option's type: int, float, str, Path, bool, Optional of one, a tuple
of a fixed length (`--shape X Y Z`) or of any (`--seeds 0 1 2`). Fields without `option` are not on
the command line."""

import argparse
import dataclasses
import functools
import operator
from pathlib import Path
from typing import (
    Any,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
    get_type_hints,
)

T = TypeVar("T")

_KEY = "option"


@dataclasses.dataclass(frozen=True)
class Option:
    """A field's metadata, beside its name, type and default."""

    help: str
    metavar: Union[str, Tuple[str, ...], None] = None
    choices: Optional[Tuple[Any, ...]] = None
    at_least: Optional[float] = None
    at_most: Optional[float] = None
    above: Optional[float] = None
    below: Optional[float] = None
    group: str = ""  # heading that --help lists it under
    one_of: str = ""  # options with the same word here exclude each other
    positional: bool = False
    rest: bool = False  # positional, and takes all words that follow, also other commands' options
    repeat: bool = False  # given again for each element of a tuple


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",  # noqa: A002, argparse's word
    metavar: Any = None,
    **more: Any,
) -> Any:
    """A dataclass field that is an option; `more` are fields of `Option`. Without `default` it has
    to be given."""
    choices = more.pop("choices", None)
    metadata = {
        _KEY: Option(help, metavar, choices=None if choices is None else tuple(choices), **more)
    }
    return dataclasses.field(default=default, metadata=metadata)


def add_options(parser: argparse.ArgumentParser, *classes: Union[type, Tuple[type, ...]]) -> None:
    """Add the options of dataclasses; an option that is not given leaves no attribute."""
    groups = functools.cache(lambda title: parser.add_argument_group(title) if title else parser)
    exclusive: Dict[str, Any] = {}
    each = [cls for part in classes for cls in (part if isinstance(part, tuple) else (part,))]
    fields = [
        (get_type_hints(cls)[field.name], field, spec)
        for cls in each
        for field, spec in _fields(cls)
    ]
    for hint, field, spec in fields:
        target = groups(spec.group)
        if spec.one_of and spec.one_of not in exclusive:
            exclusive[spec.one_of] = target.add_mutually_exclusive_group()
        target = exclusive.get(spec.one_of, target)
        flag = _flag(field)
        more: Dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field, spec)}
        inner, count = _shape_of(hint)
        if inner is bool:
            both = hint == Optional[bool]  # not "is": typing caches only the last of its types
            pair = target.add_mutually_exclusive_group() if both and not spec.one_of else target
            for on in (True, False) if both else (field.default is not True,):
                name = flag if on else flag.replace("--", "--no-")
                more["help"] = more["help"] if on or not both else f"not {flag}"
                pair.add_argument(
                    name, dest=field.name, action="store_true" if on else "store_false", **more
                )
            continue
        nargs = argparse.REMAINDER if spec.rest else None if spec.repeat and count == "+" else count
        more.update(type=inner, metavar=spec.metavar, choices=spec.choices, nargs=nargs)
        if spec.repeat:
            more["action"] = "append"
        if spec.positional or spec.rest:
            target.add_argument(field.name, **more)
        else:
            target.add_argument(
                flag, dest=field.name, required=field.default is dataclasses.MISSING, **more
            )


def given_options(cls: type, args: argparse.Namespace) -> Dict[str, Any]:
    """Field name -> value of the options of `cls` that were given, lists as tuples."""
    return {
        field.name: _frozen(getattr(args, field.name))
        for field, _ in _fields(cls)
        if hasattr(args, field.name)
    }


def from_args(cls: Type[T], args: argparse.Namespace, error: Type[Exception] = ValueError) -> T:
    """The dataclass with the options that were given, its defaults for the others. Raises `error`
    out of range."""
    settings = cls(**given_options(cls, args))
    check(settings, error)
    return settings


def arguments(
    parts: Sequence[Union[type, Tuple[type, ...]]],
    args: argparse.Namespace,
    error: Type[Exception] = ValueError,
) -> List[Any]:
    """The arguments of a command's `run`: its OPTIONS as they were given. Raises `error` for a
    value out of range."""
    return [
        {name: value for cls in part for name, value in given_options(cls, args).items()}
        if isinstance(part, tuple)
        else from_args(part, args, error)
        for part in parts
    ]


def check(settings: Any, error: Type[Exception] = ValueError) -> None:
    """Raise `error` for the first field of a dataclass that is outside its range or none of its
    choices."""
    for field, spec in _fields(type(settings)):
        value = getattr(settings, field.name)
        for part in value if isinstance(value, tuple) else () if value is None else (value,):
            rule = _broken_rule(part, spec)
            if rule:
                raise error(f"{field.name} must {rule}, got {part!r:.40}; see --help")


def to_command_line(cls: type, settings: Mapping[str, Any]) -> List[str]:
    """The command line of which `given_options` makes these settings."""
    words: List[str] = []
    for field, spec in _fields(cls):
        if field.name not in settings:
            continue
        value, flag = settings[field.name], _flag(field)
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-"))
        elif spec.repeat:
            for part in value:
                words += [flag, *_words(part)]
        else:
            words += [*([] if spec.positional or spec.rest else [flag]), *_words(value)]
    return words


def _flag(field: dataclasses.Field) -> str:
    return "--" + field.name.replace("_", "-")


def _fields(cls: type) -> Iterator[Tuple[dataclasses.Field, Option]]:
    return (
        (field, field.metadata[_KEY]) for field in dataclasses.fields(cls) if _KEY in field.metadata
    )


def _shape_of(hint: Any) -> Tuple[Any, Union[int, str, None]]:
    """(type of one word, how many of them as argparse counts) of a field's annotation."""
    arguments = getattr(hint, "__args__", ())
    if getattr(hint, "__origin__", None) is Union:
        return _shape_of(next(kind for kind in arguments if kind is not type(None)))
    if getattr(hint, "__origin__", None) is not tuple:
        return hint, None
    if arguments[-1] is not Ellipsis:
        return arguments[0], len(arguments)
    inner, count = _shape_of(arguments[0])
    return inner, count or "+"


def _help(field: dataclasses.Field, spec: Option) -> str:
    """The help line, with its default if that is a plain value and not named already."""
    default = (
        " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    )
    plain = (
        isinstance(default, (int, float, str, Path))
        and not isinstance(default, bool)
        and default != ""
    )
    if not plain or "default:" in spec.help:
        return spec.help
    return f"{spec.help} (default: {default})" if spec.help else f"default: {default}"


def _broken_rule(value: Any, spec: Option) -> str:
    """The rule that a value breaks, as in "be at least 1"; "" for none."""
    if spec.choices is not None:
        return "" if value in spec.choices else f"be one of {', '.join(map(str, spec.choices))}"
    if isinstance(value, int) and abs(value) >= 2**31:
        return "fit into 32 bits"
    rules = (
        (spec.at_least, operator.ge, "be at least"),
        (spec.above, operator.gt, "be above"),
        (spec.at_most, operator.le, "be at most"),
        (spec.below, operator.lt, "be below"),
    )
    broken = (
        f"{words} {bound:g}"
        for bound, holds, words in rules
        if bound is not None and not holds(value, bound)
    )
    return next(broken, "")


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _words(value: Any) -> List[str]:
    return list(map(str, value)) if isinstance(value, (list, tuple)) else [str(value)]
