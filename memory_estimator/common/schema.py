"""Settings as dataclasses: one declaration of a field makes its command-line option and its check.

    @dataclass(frozen=True)
    class Options:
        store: Path = option(help="store that `prepare` has written", metavar="DIR")    # required
        batch: int = option(1, help="volumes a step", at_least=1, metavar="N")
        flip: bool = option(True, help="no mirroring")                                  # --no-flip

    add_options(parser, Options)
    options = from_args(Options, parser.parse_args(argv))

A command is a module with `OPTIONS`, a dataclass for each argument of its `run`. A tuple of
dataclasses there is a dict of the options that were given; the others come from elsewhere, as from
a recipe.

A field's annotation gives the option's type: int, float, str, Path, bool, Optional of one, a tuple
of a fixed length (`--shape X Y Z`) or of any (`--seeds 0 1 2`), a tuple of tuples of int
(`--strides 2,2,1 2,2,2`), or a Union of a Literal and int or that, whose word stands for numbers
that are decided later (`--depth auto`, `--strides auto`). Fields without `option` are not on the
command line."""

import argparse
import dataclasses
import functools
import math
import operator
from pathlib import Path
from typing import (
    Any,
    Dict,
    Iterator,
    List,
    Literal,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

T = TypeVar("T")
Field = dataclasses.Field[Any]

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
    typed_at_least: Optional[float] = None
    """Of what is typed, where the field itself may hold less: that stands for none chosen."""
    group: str = ""  # heading that --help lists it under
    one_of: str = ""  # options with the same word here exclude each other
    rest: bool = False  # by its place: all words that follow, also other commands' options
    repeat: bool = False  # given again for each element of a tuple


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",  # noqa: A002, argparse's word
    metavar: Any = None,
    **more: Any,
) -> Any:
    """A dataclass field that is an option; `more` are fields of `Option`. Without `default` it has
    to be given."""
    if more.get("choices") is not None:
        more["choices"] = tuple(more["choices"])
    metadata = {_KEY: Option(help, metavar, **more)}
    return dataclasses.field(default=default, metadata=metadata)


def add_options(parser: argparse.ArgumentParser, *classes: Union[type, Tuple[type, ...]]) -> None:
    """Add the options of dataclasses; an option that is not given leaves no attribute."""
    titles: Dict[str, Any] = {"": parser}
    exclusive: Dict[str, Any] = {}
    flat: List[type] = []
    for each in classes:
        flat += each if isinstance(each, tuple) else (each,)
    for cls in flat:
        hints = get_type_hints(cls)
        for field, spec in _fields(cls):
            if spec.group not in titles:
                titles[spec.group] = parser.add_argument_group(spec.group)
            target = titles[spec.group]
            if spec.one_of:
                if spec.one_of not in exclusive:
                    exclusive[spec.one_of] = target.add_mutually_exclusive_group()
                target = exclusive[spec.one_of]
            hint = hints[field.name]
            if _shape_of(hint)[0] is bool:
                _add_switch(target, hint, field, spec)
            else:
                _add_option(target, hint, field, spec)


def _add_switch(target: Any, hint: Any, field: Field, spec: Option) -> None:
    """--name or --no-name, whichever changes the default; both if there is none."""
    common = {"dest": field.name, "default": argparse.SUPPRESS}
    flag = _flag(field)
    off = flag.replace("--", "--no-")
    words = _help(field, spec)
    if hint == Optional[bool]:  # not "is": typing caches only the last of its types
        if not spec.one_of:
            target = target.add_mutually_exclusive_group()
        target.add_argument(flag, action="store_true", help=words, **common)
        target.add_argument(off, action="store_false", help=f"not {flag}", **common)
    elif field.default is True:
        target.add_argument(off, action="store_false", help=words, **common)
    else:
        target.add_argument(flag, action="store_true", help=words, **common)


def _add_option(target: Any, hint: Any, field: Field, spec: Option) -> None:
    """An option, or the rest of the command line, with one word or several."""
    inner, nargs = _shape_of(hint)
    word = _word_of(hint)
    if isinstance(nargs, int) and get_args(_values_of(hint))[-1] is Ellipsis and not spec.repeat:
        # of a tuple of tuples each is a word
        inner = functools.partial(_whole_numbers, instead=word)
        nargs = "+"
    elif word and nargs is None:
        inner = functools.partial(_whole_numbers, instead=word, several=False)
    if spec.repeat and nargs == "+":
        nargs = None
    if spec.rest:
        nargs = argparse.REMAINDER
    more: Dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field, spec)}
    more.update(type=inner, metavar=spec.metavar, choices=spec.choices, nargs=nargs)
    if spec.repeat:
        more["action"] = "append"
    elif word and nargs is not None:
        more["action"] = _WordInstead
    if spec.rest:
        target.add_argument(field.name, **more)
    else:
        required = field.default is dataclasses.MISSING
        target.add_argument(_flag(field), dest=field.name, required=required, **more)


class _WordInstead(argparse.Action):
    """Stores a word that was given instead of numbers as itself, and numbers as a list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if len(values) == 1 and isinstance(values[0], str):
            values = values[0]
        setattr(namespace, self.dest, values)


def _whole_numbers(
    word: str, instead: str = "", several: bool = True
) -> Union[str, int, Tuple[int, ...]]:
    """A whole number, or the several of a word such as "2,2,1"; or the word that may be given
    instead."""
    if instead and word == instead:
        return word
    try:
        return tuple(map(int, word.split(","))) if several else int(word)
    except ValueError:
        rule = "must be a whole number"
        if several:
            rule = "must be whole numbers with commas, such as 2,2,1"
        if instead:
            rule += f", or {instead}"
        raise argparse.ArgumentTypeError(f"{rule}, got {word!r:.40}") from None


def given_options(
    cls: type, args: argparse.Namespace, error: Type[Exception] = ValueError
) -> Dict[str, Any]:
    """Field name -> value of the options of `cls` that were given, lists as tuples. Raises `error`
    for a value that stands for none chosen."""
    given = {}
    for field, spec in _fields(cls):
        if not hasattr(args, field.name):
            continue
        value = _frozen(getattr(args, field.name))
        _refuse_unset(field, spec, value, error)
        given[field.name] = value
    return given


def check_given(
    classes: Sequence[type], values: Mapping[str, Any], error: Type[Exception] = ValueError
) -> None:
    """Raise `error` for values, by field name, that no command line could give: of a name that no
    option of `classes` has, or a number that stands for none chosen."""
    options = {field.name: (field, spec) for cls in classes for field, spec in _fields(cls)}
    for name, value in values.items():
        if name not in options:
            rule = "a setting must have the name of an option"
            raise error(f"{rule}, got {name!r}; see --help")
        _refuse_unset(*options[name], value, error)


def _refuse_unset(field: Field, spec: Option, value: Any, error: Type[Exception]) -> None:
    if _is_unset(value, spec):
        rule = f"{_flag(field)} must be at least {spec.typed_at_least:g}"
        raise error(f"{rule}, got {value}; leave it out for its default")


def from_args(cls: Type[T], args: argparse.Namespace, error: Type[Exception] = ValueError) -> T:
    """The dataclass with the options that were given, its defaults for the others. Raises `error`
    out of range."""
    settings = cls(**given_options(cls, args, error))
    check(settings, error)
    return settings


def arguments(
    classes: Sequence[Union[type, Tuple[type, ...]]],
    args: argparse.Namespace,
    error: Type[Exception] = ValueError,
) -> List[Any]:
    """The arguments of a command's `run`: its OPTIONS as they were given. Raises `error` for a
    value out of range."""
    given: List[Any] = []
    for each in classes:
        if isinstance(each, tuple):
            given.append({})
            for cls in each:
                given[-1].update(given_options(cls, args, error))
        else:
            given.append(from_args(each, args, error))
    return given


def check(settings: Any, error: Type[Exception] = ValueError) -> None:
    """Raise `error` for the first field of a dataclass that is outside its range or none of its
    choices, by the option that sets it."""
    names = [field.name for field, _ in _fields(type(settings))]
    check_values(type(settings), {name: getattr(settings, name) for name in names}, error)


def check_values(cls: type, values: Mapping[str, Any], error: Type[Exception] = ValueError) -> None:
    """Raise `error` as `check` does, for the options of `cls` that have a value."""
    for field, spec in _fields(cls):
        value = values.get(field.name)
        if value is None:
            continue
        for each in value if isinstance(value, tuple) else (value,):
            rule = _broken_rule(each, spec)
            if rule:
                raise error(f"{_flag(field)} must {rule}, got {each!r:.40}; see --help")


def to_command_line(cls: type, settings: Mapping[str, Any]) -> List[str]:
    """The command line of which `given_options` makes these settings, but for values that stand for
    none chosen."""
    words: List[str] = []
    for field, spec in _fields(cls):
        if field.name not in settings:
            continue
        value = settings[field.name]
        if _is_unset(value, spec):
            continue
        flag = _flag(field)
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-"))
        elif spec.repeat:
            for each in value:
                words += [flag, *_words(each)]
        elif spec.rest:
            words += _words(value)
        else:
            words += [flag, *_words(value)]
    return words


GIVEN = "given"  # of a switch


def option_typed(classes: Sequence[type], name: str, value: Any) -> Optional[Tuple[str, str]]:
    """The option that sets a field of one of `classes`, and what is typed after it to have a value;
    None for a field that no option sets. Of a switch it is whether it is given."""
    for cls in classes:
        for field, _ in _fields(cls):
            if field.name != name:
                continue
            if isinstance(value, bool):
                flag = _flag(field)
                if field.default is True:
                    flag = flag.replace("--", "--no-")
                return flag, "left out" if value == field.default else GIVEN
            return _flag(field), " ".join(_words(value)) or "none"
    return None


def _flag(field: Field) -> str:
    return "--" + field.name.replace("_", "-")


def _fields(cls: Any) -> Iterator[Tuple[Field, Option]]:
    for field in dataclasses.fields(cls):
        if _KEY in field.metadata:
            yield field, field.metadata[_KEY]


def _values_of(hint: Any) -> Any:
    """The annotation of an option's values: that of a Union which is neither None nor a Literal."""
    if get_origin(hint) is not Union:
        return hint
    kinds = [kind for kind in get_args(hint) if get_origin(kind) is not Literal]
    return next(kind for kind in kinds if kind is not type(None))


def _word_of(hint: Any) -> str:
    """The word that may be given instead of an option's values; "" for none."""
    for kind in get_args(hint):
        if get_origin(kind) is Literal:
            return str(get_args(kind)[0])
    return ""


def _shape_of(hint: Any) -> Tuple[Any, Union[int, str, None]]:
    """(type of one word, how many of them as argparse counts) of a field's annotation."""
    hint = _values_of(hint)
    inside = get_args(hint)
    if get_origin(hint) is not tuple:
        return hint, None
    if inside[-1] is not Ellipsis:
        return inside[0], len(inside)
    inner, count = _shape_of(inside[0])
    return inner, "+" if count is None else count


def _help(field: Field, spec: Option) -> str:
    """The help line, with its default if that is a plain value and not named already; as argparse
    formats it, with each % twice."""
    default = field.default
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    has_value = isinstance(default, (int, float, str, Path)) and default != ""
    if isinstance(default, bool) or _is_unset(default, spec):
        has_value = False
    if not has_value or "default:" in spec.help:
        words = spec.help
    elif not spec.help:
        words = f"default: {default}"
    else:
        words = f"{spec.help} (default: {default})"
    return words.replace("%", "%%")


def _is_unset(value: Any, spec: Option) -> bool:
    """Whether a value stands for none chosen, which nobody can type."""
    if spec.typed_at_least is None or not isinstance(value, (int, float)):
        return False
    return value < spec.typed_at_least


def _broken_rule(value: Any, spec: Option) -> str:
    """The rule that a value breaks, as in "be at least 1"; "" for none."""
    if spec.choices is not None:
        if value in spec.choices:
            return ""
        return f"be one of {', '.join(map(str, spec.choices))}"
    if isinstance(value, float) and not math.isfinite(value):
        return "be a finite number"
    if isinstance(value, int) and abs(value) >= 2**31:
        return "fit into 32 bits"
    rules = (
        (spec.at_least, operator.ge, "be at least"),
        (spec.above, operator.gt, "be above"),
        (spec.at_most, operator.le, "be at most"),
        (spec.below, operator.lt, "be below"),
    )
    for bound, holds, words in rules:
        if bound is None:
            continue
        if not isinstance(value, (int, float)):
            return "be a number"
        if not holds(value, bound):
            return f"{words} {bound:g}"
    return ""


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return value


def _words(value: Any) -> List[str]:
    if not isinstance(value, (list, tuple)):
        return [str(value)]
    return [_word(each) for each in value]


def _word(value: Any) -> str:
    if isinstance(value, (list, tuple)):  # as of `_whole_numbers`
        return ",".join(map(str, value))
    return str(value)
