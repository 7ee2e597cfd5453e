"""What a frame holds, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fewbytes.base.errors import FrameError, UserError, cleaned
from fewbytes.wire import Parsed
from fewbytes.wire.frame import DIGEST, NO_HASH, PRELUDE
from fewbytes.wire.lossy import DIFFERENCE, SPARED
from fewbytes.wire.values import ROUNDED

CODINGS = {0: "raw", 1: "planes", 2: "difference to the base", 4: "what differs from the base"}
SHOWN = 40  # entries of a value that are listed


def inspect_frame(path: Path, known: Mapping[str, Sequence[str]] | None = None) -> RenderableType:
    """The frame in a file as a printable page. Raises UserError if there is no whole frame in it.

    `known` names the fields of payloads, by the payload's name: a frame holds only their order.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        such = ": name a file in its frames/, which --keep-frames keeps" if path.is_dir() else ""
        raise UserError(f"{path} cannot be read: {error.strerror}{such}") from None
    try:
        parsed = Parsed(data)
    except FrameError as error:
        raise UserError(f"{path}: {error}") from None
    header = parsed.header
    facts = Table(show_header=False, box=None)
    stored = sum(length for length, _ in header.sections)
    for name, value in {
        "payload": cleaned(header.kind),
        "bytes": f"{len(data):,} = prelude {PRELUDE}, sections {stored:,}, digest {DIGEST}, "
        f"header and padding {len(data) - PRELUDE - stored - DIGEST:,}",
        "format": parsed.version,
        "digest": parsed.digest.hex(),
        "layout": "none: names and shapes stand in the frame"
        if parsed.layout_hash == NO_HASH
        else parsed.layout_hash.hex(),
        "base": "none" if parsed.base_hash == NO_HASH else f"{parsed.base_hash.hex()} (the message this one answers)",
    }.items():
        facts.add_row(Text(name, "bold"), value)
    fields = Table("field", "content", title="fields", title_justify="left", box=None)
    names = (known or {}).get(header.kind, ())
    named = list(names) if len(names) == len(header.fields) else [str(number) for number in range(len(header.fields))]
    for name, field in zip(named, header.fields, strict=True):
        try:
            lines = _describe(field)
        except (TypeError, ValueError, IndexError, RecursionError):
            lines = ["not what this version writes"]
        for line in lines:
            fields.add_row(name, cleaned(line))
            name = ""
    sections = Table("section", "bytes", "CRC32C", title="sections", title_justify="left", box=None)
    for number, (length, checksum) in enumerate(header.sections):
        sections.add_row(str(number), f"{length:,}", f"{checksum:08x}")
    return Group(facts, "", fields, "", sections)


def _describe(field: Any) -> list[str]:
    """A field's header in words: plain values as they are, arrays by their entries and coding."""
    match field:
        case [(True | bytes() | list()) as entries, [kind, flag, length, ones], [int(), *_] as numbers] if _entries(
            entries
        ):
            return [*_entries(entries), _mask(kind, flag, length, ones), f"values: {_numbers(numbers)}"]
        case [(True | bytes() | list()) as entries, [int(kind), int(flag), length, ones]] if _entries(entries):
            return [*_entries(entries), _mask(kind, flag, length, ones)]
        case [entries, int(), [_, length, count], [int(), *_] as numbers] if _entries(entries):
            return [
                *_entries(entries),
                f"places of {count:,} in Rice's code, {length:,} bytes",
                f"values: {_numbers(numbers)}",
            ]
        case [entries, int(), [kind, flag, length, ones], [int(), *_] as numbers] if _entries(entries):
            return [
                *_entries(entries),
                f"places of {ones:,}: {_mask(kind, flag, length, ones)}",
                f"values: {_numbers(numbers)}",
            ]
        case [(True | bytes() | list()) as entries, int(bits), [int(), *_], [int(), *_] as levels] if _entries(entries):
            return [*_entries(entries), f"levels of {bits} bits: {_numbers(levels)}"]
        case [(True | bytes() | list()) as entries, [[int(), *_], *_] as groups] if _entries(entries):
            return [*_entries(entries), *(f"values: {_numbers(group)}" for group in groups)]
        case [entries, [_, _, _, signed], [_, _, _, ones], [int(), *_]] if _entries(entries):
            return [*_entries(entries), f"signs: {ones:,} positive of {signed:,} that are not zero, and a scale"]
        case [[int(n), int(channels), int(height), int(width)], None | [int(), *_] as numbers]:
            how = "lossless WebP" if numbers is None else _numbers(numbers)
            return [f"{n:,} images, {channels}x{height}x{width}: {how}"]
        case _:
            text = repr(field)
            return [text if len(text) < 200 else text[:200] + "…"]


def _entries(entries: Any) -> list[str]:
    match entries:
        case True:
            return ["all entries of the model"]
        case bytes():
            return [f"{sum(b.bit_count() for b in entries)} of the model's entries"]
        case list() if all(isinstance(e, list) and len(e) == 3 and isinstance(e[2], list) for e in entries):
            listed = [
                f"{f'{name}: ' if name else ''}{dtype} {'x'.join(map(str, shape)) or 'scalar'}"
                for name, dtype, shape in entries
            ]
            more = [f"… and {len(listed) - SHOWN} more"] if len(listed) > SHOWN else []
            return listed[:SHOWN] + more or ["no entries"]
        case _:
            return []


def _mask(kind: int, flag: int, length: int, ones: int) -> str:
    names = ("packed bits", "gaps between ones", "gaps between zeros")
    return f"mask of {ones:,} ones as {names[kind]}, {length:,} bytes" + (" before zstandard" if flag else "")


def _numbers(header: list[Any]) -> str:
    if header[0] == ROUNDED:
        _, ways, step, _, _, rest = header
        parts = [f"{len(ways) - ways.count(SPARED)} of {len(ways)} tensors in steps of {step:.3g}"]
        parts += [f"{ways.count(DIFFERENCE)} as differences to the base"] if DIFFERENCE in ways else []
        return f"rounded: {', '.join(parts)}" + (f"; the others: {_numbers(rest)}" if SPARED in ways else "")
    how = CODINGS.get(header[0], "?")
    match header:
        case [4, [kind, flag, length, ones], _]:
            how += f", a {_mask(kind, flag, length, ones)}"
    if len(header) == 1:
        return how
    return f"{how} ({', '.join('zstandard' if flag else 'raw' for flag in header[-1])}; lowest first)"
