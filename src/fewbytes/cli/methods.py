"""Shows the list of methods, or the description of one."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fewbytes.experiments.catalogue import KINDS, About

NAME = "bold cyan"


def all_of(methods: Sequence[About]) -> RenderableType:
    """All methods by kind, each with what a client sends per round."""
    parts: list[RenderableType] = []
    width = max((len(each.name) for each in methods), default=0) + 2
    for kind, words in KINDS.items():
        parts.append(Text.assemble((f"{kind[0].upper()}{kind[1:]}", "bold"), (f": {words}", "dim")))
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
        table.add_column(width=width, style=NAME, no_wrap=True)
        table.add_column("sends")
        for each in methods:
            if each.kind == kind:
                table.add_row(each.name, each.sends)
        parts += [table, Text()]
    parts.append(Text("Right column: what a client sends per round. fewbytes methods NAME describes one.", "dim"))
    return Group(*parts)


def one(method: About) -> RenderableType:
    """A method's kind, paper, idea and cost, and a table of its parameters."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("parameter", "default", "values", "meaning"):
        table.add_column(head, no_wrap=head in ("parameter", "default"), style=NAME if head == "parameter" else "")
    for each in method.parameters:
        table.add_row(each.name, _written(each.default), each.kind, each.meaning)
    sends = f"; a client sends {method.sends}" if method.sends else ""
    title = Text.assemble((method.name, NAME), f": {method.kind}{sends}")
    paragraphs = [Text(text) for text in (method.paper, method.idea, method.cost) if text]
    return Group(title, Text(), *(part for text in paragraphs for part in (text, Text())), table)


def _written(value: object) -> str:
    """A value as `--set` takes it."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def cited(methods: Sequence[About]) -> list[str]:
    """The BibTeX entries of the methods' papers, each once."""
    return [paper.bibtex() for paper in dict.fromkeys(paper for each in methods for paper in each.papers)]
