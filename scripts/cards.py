"""Draws each method's figure from docs/decisions.json, puts it on the method's card, and writes the list of methods.

python scripts/cards.py     # after scripts/decisions.py
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from fewbytes.experiments.catalogue import KINDS, about
from fewbytes.methods import METHODS

ROOT = Path(__file__).parents[1]
CARDS = ROOT / "docs" / "methods"
VIEWS = ((2, "each client's own model"), (3, "global model"))
GREY, COLOUR = "#8a8f98", "#2f81f7"  # legible on white and on black
BASELINES = {"fedavg": "#e07b1f", "separate": "#2da44e"}
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "fewbytes", "font.family": "sans-serif", "font.size": 10,
    "text.color": GREY, "axes.edgecolor": GREY, "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


def has_both(runs: list[dict[str, Any]]) -> bool:
    """Whether bytes down were recorded round by round, too."""
    return all(point[1] is not None for run in runs for point in run["rounds"])


def curve(axes: Axes, runs: list[dict[str, Any]], view: int, both: bool, style: dict[str, str]) -> None:
    """Accuracy over MB of `both` directions, or up, a line a seed; a method that is scored once is a dot a seed."""
    for run in runs:
        points = [
            (point[0] + point[1] if both else point[0], point[view])
            for point in run["rounds"]
            if point[view] is not None
        ]
        if points:
            mark = "o" if len(points) == 1 else ""
            axes.plot(*zip(*points, strict=True), marker=mark, lw=1.6, ms=5, **style)
            style = style | {"label": ""}  # named once


def figure(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    """A method's accuracy over the bytes of all clients, beside FedAvg's, and training alone as a level."""
    both = has_both(found[name] + found["fedavg"])
    views = [
        (view, title) for view, title in VIEWS if any(point[view] is not None for point in found[name][0]["rounds"])
    ]
    with plt.rc_context(STYLE):
        drawn, rows = plt.subplots(1, len(views), figsize=(3.6 * len(views) + 0.4, 2.9), sharey=True, squeeze=False)
        for axes, (view, title) in zip(rows[0], views, strict=True):
            alone = [run["own"] for run in found["separate"]]
            if view == VIEWS[0][0] and name != "separate":
                axes.axhline(
                    sum(alone) / len(alone), color=BASELINES["separate"], lw=1.4, ls=":", label="training alone"
                )
            if name != "fedavg":
                curve(axes, found["fedavg"], view, both, {"color": BASELINES["fedavg"], "label": "fedavg"})
            curve(axes, found[name], view, both, {"color": COLOUR, "label": name})
            axes.set(title=title, xlabel=f"MB {'up + down' if both else 'up'}, all clients", ylim=(0, 1))
            axes.yaxis.set_major_formatter(PercentFormatter(1))
            if name != "separate":
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
                axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.xaxis.set_minor_formatter(NullFormatter())
            axes.legend(frameon=False, fontsize=8, loc="lower right")
        drawn.tight_layout()
        drawn.savefig(CARDS / "pictures" / f"{name}.svg", transparent=True, metadata={"Date": None})
        plt.close(drawn)


def card(name: str, model: str, both: bool) -> str:
    """The card with its figure: in place of the one that is there, or after what it does, and the paper."""
    text = (CARDS / f"{name}.md").read_text("utf-8")
    text = re.sub("<!-- figure -->.*?<!-- /figure -->\n\n", "", text, flags=re.DOTALL)
    title, purpose, paper, rest = text.split("\n\n", 3)
    moved = "sent and received" if both else "sent (the download is not in it)"
    words = textwrap.fill(
        f"Accuracy against the bytes that all clients {moved}: "
        f"digits, 10 clients, alpha 1, `{model}`, 20 rounds, three seeds "
        "([all methods, both directions and the settings](../which.md#measured)).",
        120,
    )
    picture = f"![{name}: accuracy over MB {'up + down' if both else 'up'}](pictures/{name}.svg)"
    block = f"<!-- figure -->\n{picture}\n\n{words}\n<!-- /figure -->"
    return "\n\n".join([title, purpose, paper, block, rest])


def listed() -> str:
    """The text of docs/methods/index.md: every method by kind, and what its clients send."""
    lines = [
        "<!-- by scripts/cards.py -->\n# Methods\n",
        "`fewbytes methods` lists all methods, `fewbytes methods NAME` describes one. The tables show what a client "
        "sends in a round. The [glossary](../glossary.md) explains the terms.\n",
    ]
    known = [about(name, method) for name, method in METHODS.items()]
    for kind in KINDS:
        of_kind = sorted((each for each in known if each.kind == kind), key=lambda each: each.name)
        lines += [f"## {kind[0].upper()}{kind[1:]}\n", "| method | what a client sends |", "| --- | --- |"]
        lines += [f"| [`{each.name}`]({each.name}.md) | {each.sends} |" for each in of_kind]
        lines += ["\n```{toctree}\n:hidden:\n", *(each.name for each in of_kind), "```\n"]
    lines += [
        "## Wrappers of any method\n",
        "[`Clustered`](clustered.md) runs a method once in each cluster of clients with similar data.\n",
        "```{toctree}\n:hidden:\n\nclustered\n```",
    ]
    return "\n".join(lines) + "\n"


def tasks(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """By method the model that it was measured with: the first of the file that it could train."""
    return {name: model for model, runs in reversed(found.items()) for name in runs}


def pages(found: dict[str, dict[str, Any]]) -> dict[Path, str]:
    """The cards with their figures, and the list of methods."""
    cards = {
        CARDS / f"{name}.md": card(name, model, has_both(found[model][name] + found[model]["fedavg"]))
        for name, model in tasks(found).items()
    }
    return {**cards, CARDS / "index.md": listed()}


def main() -> None:
    found = json.loads((ROOT / "docs" / "decisions.json").read_text("utf-8"))
    (CARDS / "pictures").mkdir(exist_ok=True)
    for name, model in tasks(found).items():
        figure(name, found[model])
    for path, text in pages(found).items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
