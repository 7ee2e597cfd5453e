"""Settings, each declared once: its name, type with range, default, and one line for people.

A group of settings is a frozen dataclass, a `Group`, whose fields are made by `setting`. The command line's options,
config.toml, result.json, Flower's run config, keyword arguments in Python and all checks follow from it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import msgspec

from fewbytes.base.errors import UserError, suggestion
from fewbytes.base.ranges import check_ranges, wrong


@dataclass(frozen=True)
class Text:
    """How a value of several parts stands in one line: `read` raises ValueError for what is not `like` it.

    `kinds`: the types of what is read.
    """

    like: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any]
    kinds: Any = str


@dataclass(frozen=True)
class Setting:
    """What a group says of one field, besides its name, type and default.

    `key`: its name in files and on the command line. `option`: how the command line spells it; None: not at all.
    `resumable`: may be another when a run is resumed, as no result depends on it while all clients answer.
    `brief`: config.toml and result.json name it only where it is not the default.
    """

    help: str
    key: str = ""
    option: str | None = ""
    metavar: str | None = None
    text: Text | None = None
    resumable: bool = False
    brief: bool = False


def setting(default: Any, help: str, **more: Any) -> Any:
    """A field of a group: its default and, as in `Setting`, all else."""
    about = {Setting: Setting(help, **more)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Declared:
    """A setting as its group declares it."""

    name: str
    kind: Any
    default: Any
    about: Setting


@dataclass(frozen=True)
class Group:
    """Base of groups of settings. Fields that no `setting` made are arguments in Python only."""

    title: ClassVar[str] = ""
    """What the group is called in --help."""
    given: ClassVar[str] = ""
    """How Python gives one of its settings, as in fb.run(…, {}); empty: by making the group."""

    def __post_init__(self) -> None:
        """Check values by their types. Raises UserError."""
        check_ranges(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Made of keyword arguments. Raises UserError for one there is not."""
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
        """Made of values by key, as files or the command line have them, as text too. Raises UserError.

        Keys of other groups are left alone.
        """
        return cls(
            **{each.name: _read(key, each, values[key]) for key, each in cls.declared().items() if key in values}
        )

    def written(self) -> dict[str, Any]:
        """By key, every setting that has a value, but for brief ones at their default."""
        values = {key: (getattr(self, each.name), each) for key, each in self.declared().items()}
        return {
            key: value
            for key, (value, each) in values.items()
            if value is not None and not (each.about.brief and value == each.default)
        }

    def in_text(self) -> dict[str, Any]:
        """As `written`, where only plain values, and tables of them, can stand."""
        declared = self.declared()
        return {
            key: text.write(value) if (text := declared[key].about.text) is not None else value
            for key, value in self.written().items()
        }


def _read(key: str, each: Declared, value: Any) -> Any:
    text, given = each.about.text, value
    if text is not None and isinstance(value, text.kinds):
        try:
            value = text.read(value)
        except (ValueError, RecursionError):
            raise UserError(f"{key} is {text.like}, not {given!r}") from None
    if must := wrong(each.kind, value):
        raise UserError(f"{key} {must}, not {value!r}")
    try:
        return msgspec.convert(value, each.kind)
    except msgspec.ValidationError as error:
        if text is not None:
            raise UserError(f"{key} is {text.like}, not {given!r}") from None
        raise UserError(f"{key}: {str(error)[:1].lower()}{str(error)[1:]}") from None


def whole_numbers(separator: str, like: str) -> Text:
    """Whole numbers with a separator between them."""

    def read(text: str) -> list[int]:
        if not re.fullmatch(rf"\s*[0-9]+\s*({separator}\s*[0-9]+\s*)*", text):
            raise ValueError(text)
        return [int(part) for part in text.split(separator)]

    return Text(like, read, lambda values: separator.join(map(str, values)))
