"""A partition as a figure, clients by classes: in the terminal, as SVG and as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fewbytes.base.errors import UserError, listed, visible
from fewbytes.base.files import replacing
from fewbytes.report.charts import called, class_means, together
from fewbytes.report.pieces import cut
from fewbytes.report.records import Partition

INK, MUTED = "#1a2230", "#5c6675"
LOW, HIGH = (238, 243, 250), (27, 84, 158)
"""Colours of a cell without samples, and of the fullest one."""
MARKS = "▁▂▃▄▅▆▇█"
NONE = "·"
PRINTED = 40  # maximum number of clients in the terminal
SMALL, LARGE = 11, 13  # sizes of text
BAR = 90  # width of the longest bar


@dataclass(frozen=True)
class Rectangle:
    """A filled rectangle, in pixels."""

    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True)
class Word:
    """A text whose `anchor` (start, middle or end) is at (x, y), on its middle line; `upright`: read from below."""

    x: float
    y: float
    text: str
    size: int = SMALL
    anchor: str = "start"
    colour: str = INK
    upright: bool = False


Shapes = Sequence[Rectangle | Word]


def partition_table(partition: Partition, width: int) -> RenderableType:
    """The clients' numbers of samples, and a bar per class, all on one scale; neighbouring classes share a bar if the
    terminal is narrow."""
    classes, clients = partition["classes"], len(partition["train"])
    rows = [_row(partition, range(i, i + 1)) for i in range(clients)]
    names = [called(range(i, i + 1), partition.get("names", [])) for i in range(min(clients, PRINTED))]
    validated = partition.get("validation")
    heads = ["client", "training", *(["validation"] if validated else []), "test"]
    room = max(8, width - max(map(len, ["client", *names])) - 12 * len(heads))
    each = -(-len(classes) // room)
    binned = [[sum(row[k : k + each]) for k in range(0, len(row), each)] for row in rows]
    most = max((value for row in binned for value in row), default=0)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head == "client" else "right", no_wrap=True)
    table.add_column("classes (training)", no_wrap=True)
    for i, name in enumerate(names):
        splits = [partition["train"], *([validated] if validated else []), partition["test"]]
        sizes = [f"{total(split[i]):,}" for split in splits]
        table.add_row(visible(name), *sizes, "".join(_mark(value, most) for value in binned[i]))
    more = f"… and {clients - PRINTED} more clients (--json or --figure has all)\n" if clients > PRINTED else ""
    joined = f"; each mark is {each} classes" if each > 1 else ""
    scale = f"{NONE} none, {MARKS[-1]} {most:,.0f} samples; classes from left to right: {listed(classes, 10)}{joined}"
    return Group(table, Text(f"{more}{visible(scale)}"))


def _row(partition: Partition, group: range) -> list[float]:
    """A client's training samples of each class, or a group's mean; 0 if they are not known."""
    means = class_means([partition["train"][i] for i in group], len(partition["classes"]))
    return [value or 0 for value in means]


def _mark(value: float, most: float) -> str:
    return MARKS[min(len(MARKS) - 1, int(len(MARKS) * value / most))] if value else NONE


def total(row: list[int] | int | None) -> int:
    """A client's number of samples."""
    return sum(row) if isinstance(row, list) else row or 0


def write_figure(partition: Partition, title: str, path: Path) -> None:
    """Write the figure to a file, SVG or PNG by its name. Raises UserError for another name."""
    check_figure(path)
    shapes, size = _drawn(partition, title)
    with replacing(path) as file:
        file.write(WRITERS[path.suffix.lower()](shapes, *size))


def check_figure(path: Path) -> None:
    """Raises UserError for a file that is neither SVG nor PNG by its name, or is in no folder."""
    if path.suffix.lower() not in WRITERS:
        raise UserError(f"--figure is a .svg or .png file, not {path.name!r}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--figure: there is no folder {path.parent}: make it first")


def _drawn(partition: Partition, title: str) -> tuple[Shapes, tuple[int, int]]:
    """The figure and its size: a row of cells per client (very many: per group of neighbours), a bar for its size."""
    classes, groups = [visible(name) for name in partition["classes"]], together(len(partition["train"]))
    rows = [_row(partition, group) for group in groups]
    names = [visible(called(group, partition.get("names", []))) for group in groups]
    most, sums = max((value for row in rows for value in row), default=0), [sum(row) for row in rows]
    wide, high = _side(len(classes), 38, 1100), _side(len(rows), 24, 900)
    upright = max(map(len, classes), default=0) * 7 > wide
    left = 16 + 7 * min(32, max(map(len, names), default=0)) + 8
    top = 44 + (min(20, max(map(len, classes))) * 7 + 8 if upright else 22)
    right, bottom = left + len(classes) * wide, top + len(rows) * high
    shapes: list[Rectangle | Word] = [Word(16, 20, f"{title}: training samples of each client, by class", LARGE)]
    every = -(-14 // max(1, round(wide)))  # a name for as many classes as there is room for
    for k, name in enumerate(classes):
        if k % every == 0:
            x = left + (k + 0.5) * wide
            words = cut(name, 20)
            shapes.append(
                Word(x, top - 8, words, upright=True) if upright else Word(x, top - 12, words, anchor="middle")
            )
    every = -(-14 // max(1, round(high)))
    for i, (name, row) in enumerate(zip(names, rows, strict=True)):
        y = top + i * high
        if i % every == 0:
            shapes.append(Word(left - 8, y + high / 2, cut(name, 32), anchor="end"))
        for k, value in enumerate(row):
            x, share = left + k * wide, value / most if most else 0
            gap = 1 if min(wide, high) > 6 else 0
            shapes.append(Rectangle(x, y, wide - gap, high - gap, _between(share)))
            if wide >= 30 and high >= 18 and value:
                ink = "#ffffff" if share > 0.5 else INK
                shapes.append(Word(x + wide / 2, y + high / 2, f"{value:.4g}", anchor="middle", colour=ink))
        length = BAR * sums[i] / (max(sums) or 1)
        shapes.append(Rectangle(right + 12, y + high * 0.15, length, max(1, high * 0.7), "#9fb3cc"))
        if i % every == 0:
            shapes.append(Word(right + 18 + length, y + high / 2, f"{sums[i]:,.5g}", colour=MUTED))
    shapes += [Rectangle(left + 4 * k, bottom + 16, 4, 12, _between(k / 39)) for k in range(40)]
    shapes += [
        Word(left - 8, bottom + 22, "0", anchor="end", colour=MUTED),
        Word(left + 168, bottom + 22, f"{most:,.5g} samples", colour=MUTED),
    ]
    return shapes, (round(max(right + BAR + 80, left + 280, 16 + 7.5 * len(title) + 330)), round(bottom + 44))


def _side(number: int, usual: float, most: float) -> float:
    """The side of a cell: smaller if there are many."""
    return max(3.0, min(usual, most / max(1, number)))


def _between(share: float) -> str:
    return "#" + "".join(f"{round(low + (high - low) * share):02x}" for low, high in zip(LOW, HIGH, strict=True))


def _svg(shapes: Shapes, width: int, height: int) -> bytes:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif">\n<rect width="100%" height="100%" fill="#ffffff"/>'
    ]
    for each in shapes:
        if isinstance(each, Rectangle):
            parts.append(
                f'<rect x="{each.x:.1f}" y="{each.y:.1f}" width="{each.width:.1f}" height="{each.height:.1f}" '
                f'fill="{each.colour}"/>'
            )
            continue
        turn = f' transform="rotate(-90 {each.x:.1f} {each.y:.1f})"' if each.upright else ""
        parts.append(
            f'<text x="{each.x:.1f}" y="{each.y:.1f}" font-size="{each.size}" text-anchor="{each.anchor}" '
            f'dominant-baseline="central" fill="{each.colour}"{turn}>{escape(each.text)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"]).encode()


def _png(shapes: Shapes, width: int, height: int) -> bytes:
    from PIL import Image, ImageDraw, ImageFont

    scale = 2  # sharp on screens and in print
    image = Image.new("RGB", (scale * width, scale * height), "#ffffff")
    draw = ImageDraw.Draw(image)
    for each in shapes:
        x, y = scale * each.x, scale * each.y
        if isinstance(each, Rectangle):
            draw.rectangle((x, y, x + scale * max(1, each.width) - 1, y + scale * each.height - 1), fill=each.colour)
            continue
        font = ImageFont.load_default(scale * each.size)
        if each.upright:
            words = Image.new("L", (round(font.getlength(each.text)) + 4, round(2 * scale * each.size)))
            ImageDraw.Draw(words).text((2, words.height / 2), each.text, 255, font, anchor="lm")
            turned = words.rotate(90, expand=True)
            image.paste(each.colour, (round(x - turned.width / 2), round(y - turned.height)), turned)
            continue
        draw.text(
            (x, y), each.text, each.colour, font, anchor={"start": "lm", "middle": "mm", "end": "rm"}[each.anchor]
        )
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


WRITERS = {".svg": _svg, ".png": _png}
"""What writes the figure, by the ending of a file's name."""
