"""A human-readable view of a frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fewbytes.base.errors import FrameError, UserError, cleaned
from fewbytes.wire import words
from fewbytes.wire.frame import Parsed
from fewbytes.wire.schema import Kind, schema_of

NOTHING: Mapping[str, type[Any]] = MappingProxyType({})


def inspect_frame(path: Path, known: Mapping[str, type[Any]] = NOTHING) -> RenderableType:
    """The frame in a file as a printable page. Raises UserError if the file has no complete frame. `known`: as in
    `inspected`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        such = ": name a file in its frames/, which --keep-frames keeps" if path.is_dir() else ""
        raise UserError(f"{path} cannot be read: {error.strerror}{such}") from None
    return inspected(data, path, known)


def inspected(data: bytes, path: Path, known: Mapping[str, type[Any]] = NOTHING) -> RenderableType:
    """A frame as a printable page. Raises UserError, which names the file at `path`, if it is not complete.

    `known`: payload classes by name. A frame has only its class's name and the fields in order; their names and the
    meaning of their headers come from the class.
    """
    try:
        parsed = Parsed(data)
    except FrameError as error:
        raise UserError(f"{path}: {error}") from None
    facts = Table(show_header=False, box=None)
    stored, digest = sum(section.nbytes for section in parsed.sections), len(parsed.digest)
    for name, value in {
        "payload": cleaned(parsed.kind) + ("" if parsed.kind in known else ", an unknown class: shown undecoded"),
        "bytes": f"{len(data):,} = sections {stored:,}, digest {digest}, header {len(data) - stored - digest:,}",
        "format": parsed.version,
        "digest": parsed.digest.hex(),
        "layout": "none: the frame contains names and shapes" if not parsed.layout_hash else parsed.layout_hash.hex(),
        "base": f"{parsed.base_hash.hex()} (the message this one answers)" if parsed.base_hash else "none",
    }.items():
        facts.add_row(Text(name, "bold"), value)
    fields = Table("field", "content", title="fields", title_justify="left", box=None)
    before = ""
    for name, line in lines_of(parsed.fields, known.get(parsed.kind)):
        fields.add_row("" if name == before else name, cleaned(line))
        before = name
    sections = Table("section", "bytes", title="sections", title_justify="left", box=None)
    for number, section in enumerate(parsed.sections):
        sections.add_row(str(number), f"{section.nbytes:,}")
    return Group(facts, "", fields, "", sections)


def lines_of(header: list[Any], kind: type[Any] | None) -> Iterator[tuple[str, str]]:
    """Paths of values in a payload of a class (None: unknown), each with a line of description."""
    kinds = [] if kind is None else [(field.name, field.kind) for field in schema_of(kind).fields]
    if len(kinds) != len(header):
        kinds = [(str(number), Kind("plain", object)) for number in range(len(header))]
    for (name, part), item in zip(kinds, header, strict=True):
        try:
            yield from list(_described(part, item, name))
        except (TypeError, ValueError, IndexError, KeyError, AttributeError, RecursionError):
            yield name, "not written by this version"


def _described(kind: Kind, item: Any, path: str) -> Iterator[tuple[str, str]]:
    """Descriptions of a value in a header, and of its parts, by path."""
    match kind.form:
        case "wire":
            yield from ((path, line) for line in kind.of.describe(item))
        case "state" | "tensor":
            yield from ((path, line) for line in words.named(item))
        case "bytes":
            yield path, f"{item:,} bytes"
        case "optional" if item is not None:
            yield from _described(kind.parts[0], item[0], path)
        case "list" | "row" | "tuple" if not kind.plain:
            for i, each in enumerate(item):
                yield from _described(kind.parts[i if kind.form == "tuple" else 0], each, f"{path}[{i}]")
        case "dict" if not kind.plain:
            for key, each in item:
                yield from _described(kind.parts[1], each, f"{path}[{key!r}]")
        case "dataclass":
            for field, each in zip(kind.fields, item, strict=True):
                yield from _described(field.kind, each, f"{path}.{field.name}")
        case _:
            text = repr(item)
            yield path, text if len(text) < 200 else text[:200] + "…"
