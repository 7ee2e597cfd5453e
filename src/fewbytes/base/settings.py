"""Settings, each declared once: name, type with range, default, and a one-line help text.

A group of settings is a frozen dataclass, a `Group`, whose fields are made by `setting`. It defines the command line's
options, config.toml, result.json, Flower's run config, Python's keyword arguments and all checks.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self, TypeVar

import msgspec

from fewbytes.base.errors import UserError, suggestion
from fewbytes.base.ranges import check_ranges, wrong

GroupType = TypeVar("GroupType", bound="Group")


@dataclass(frozen=True)
class Text:
    """How values of a type are written in one line, as metadata of its `Annotated`. Not needed for a class with a class
    method `read` of text, which raises UserError, and a matching str().

    `read` raises ValueError for a text that is not `like` a value. `kinds`: the types that `read` returns.
    """

    like: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    kinds: Any = str


def text_of(kind: Any) -> Text | None:
    """How values of a type are written as text; None: no text form."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return next((each for each in args[1:] if isinstance(each, Text)), None) or text_of(args[0])
    if origin in (typing.Union, types.UnionType):
        return next((found for arg in args if (found := text_of(arg)) is not None), None)
    if not _reads(kind):
        return None
    return Text(f"as {kind.__name__} reads it", lambda given: kind.read(str(given)), str, kinds=str | int | float)


def in_file(value: Any) -> Any:
    """A setting's value as stored in files."""
    return str(value) if _reads(type(value)) else value


def _reads(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "read")


NAMES = Text("names with commas", lambda text: [name.strip() for name in text.split(",")], ",".join)
Names = Annotated[Sequence[str], NAMES]


@dataclass(frozen=True)
class Setting:
    """What a group declares about a field, besides its name, type and default.

    `key`: its name in files and on the command line. `option`: its spelling on the command line; None: no option.
    `resumable`: may change when a run is resumed, as no result depends on it while all clients answer. `brief`: left
    out of config.toml and result.json where it equals the default.
    """

    help: str
    key: str = ""
    option: str | None = ""
    metavar: str | None = None
    resumable: bool = False
    brief: bool = False


def setting(default: Any, help: str, **more: Any) -> Any:
    """A field of a group: its default and the arguments of `Setting`."""
    about = {Setting: Setting(help, **more)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Declared:
    """A setting as declared by its group."""

    name: str
    kind: Any
    default: Any
    about: Setting

    @functools.cached_property
    def text(self) -> Text | None:
        """`text_of` its type."""
        return text_of(self.kind)

    def is_text(self, value: Any) -> bool:
        """Whether a value is in the text form of its type."""
        return self.text is not None and isinstance(value, self.text.kinds) and not isinstance(value, bool)

    def read(self, key: str, given: Any) -> Any:
        """Convert a value from a file or the command line to its type. Raises UserError, which names the key."""
        value = given
        if self.text is not None and self.is_text(given):
            try:
                value = self.text.read(given)
            except (ValueError, OverflowError, RecursionError):
                raise UserError(f"{key} is {self.text.like}, not {given!r}") from None
        if must := wrong(self.kind, value):
            raise UserError(f"{key} {must}, not {value!r}")
        try:
            return value if _reads(type(value)) else msgspec.convert(value, self.kind)
        except msgspec.ValidationError as error:
            if self.text is not None:
                raise UserError(f"{key} is {self.text.like}, not {given!r}") from None
            raise UserError(f"{key}: {str(error)[:1].lower()}{str(error)[1:]}") from None


def reads_text(group: type[GroupType]) -> type[GroupType]:
    """Let a group's constructor accept settings as text, too."""
    init = group.__init__

    @functools.wraps(init)
    def read(self: GroupType, *args: Any, **values: Any) -> None:
        for each in group.declared().values() if values else ():
            if each.is_text(values.get(each.name)):
                values[each.name] = each.read(each.name, values[each.name])
        init(self, *args, **values)

    setattr(group, "__init__", read)  # noqa: B010
    return group


@dataclass(frozen=True)
class Group:
    """Base of groups of settings. Fields not made by `setting` are arguments in Python only."""

    title: ClassVar[str] = ""
    """The group's title in --help."""
    given: ClassVar[str] = ""
    """How Python passes one of its settings, as in fb.run(…, {}); empty: to the group's constructor."""

    def __post_init__(self) -> None:
        """Check values against their types. Raises UserError."""
        check_ranges(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """A group from keyword arguments. Raises UserError for an unknown one."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise UserError(f"there is no setting {name!r}{suggestion(name, names)}")
        return cls(**values)

    @classmethod
    @functools.cache
    def declared(cls) -> dict[str, Declared]:
        """The group's settings by key."""
        hints, defaults = typing.get_type_hints(cls, include_extras=True), cls()
        made = [
            Declared(f.name, hints[f.name], getattr(defaults, f.name), f.metadata[Setting])
            for f in dataclasses.fields(cls)
            if Setting in f.metadata
        ]
        return {each.about.key or each.name: each for each in made}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """A group from values by key, as in files or on the command line, also as text. Raises UserError.

        Ignores keys of other groups.
        """
        return cls(**{each.name: each.read(key, values[key]) for key, each in cls.declared().items() if key in values})

    def written(self) -> dict[str, Any]:
        """By key, in the form of files, every setting that has a value, except brief ones at their default."""
        return {key: in_file(value) for key, value in self._named().items()}

    def in_text(self) -> dict[str, Any]:
        """Like `written`, for files that can only have plain values, and tables of them."""
        declared = self.declared()
        return {
            key: value if (text := declared[key].text) is None else text.write(value)
            for key, value in self._named().items()
        }

    def _named(self) -> dict[str, Any]:
        values = {key: (getattr(self, each.name), each) for key, each in self.declared().items()}
        return {
            key: value
            for key, (value, each) in values.items()
            if value is not None and not (each.about.brief and value == each.default)
        }


def whole_numbers(separator: str, like: str) -> Text:
    """Whole numbers, separated by `separator`."""

    def read(text: str) -> list[int]:
        if not re.fullmatch(rf"\s*[0-9]+\s*({separator}\s*[0-9]+\s*)*", text):
            raise ValueError(text)
        return [int(part) for part in text.split(separator)]

    return Text(like, read, lambda values: separator.join(map(str, values)))
