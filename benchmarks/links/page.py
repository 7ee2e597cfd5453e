"""The comparison's tables in the documents, from docs/links.json, and the picture of the first page.

python benchmarks/links/page.py links.jsonl     # takes what compare.py measured into docs/links.json first
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "links.json"
FLOWER, OURS = "Flower's FedAvg", "Flower's FedAvg, two lines changed"
MARGIN = 0.005
"""The target is Flower's last accuracy, less this."""
RATE = 10.0
"""Mbit/s of README's table and picture."""
SITES = 3
DEPLOYED, ALONE = "fewbytes deploy fedavg", "training alone"
WITHOUT = f"{OURS}, without first"
"""Run for its first model's bytes alone, which a sentence states."""
SHOWN = {FLOWER: "#8a8f98", OURS: "#1f6feb", DEPLOYED: "#1a7f37", "NVFlare's FedAvg, 8 bits": "#b0712f"}
"""The systems there, and their colours."""
NAMED = {OURS: "the same app with fewbytes, two lines changed", DEPLOYED: "`fewbytes deploy fedavg`"}


def table(runs: list[dict[str, Any]], learned: bool) -> str:
    """Runs at one rate as a table, each compared with Flower's own. `learned`: with accuracies, which few rounds do not
    show."""
    first = next(run for run in runs if run["system"] == FLOWER)
    heads = ["", "rounds", "MB up", "MB down", "MB both", f"a round: times fewer bytes than {FLOWER}"]
    heads += ["s a round", "on the link, s"]
    if learned:
        heads += [f"accuracy after round {len(first['seconds'])}", "s to target (round)", "MB to target"]
    rows = [" | ".join(_cells(run, first, learned)) for run in runs]
    return "\n".join(
        [f"| {' | '.join(heads)} |", f"| --- {'| ---: ' * (len(heads) - 1)}|", *(f"| {r} |" for r in rows)]
    )


def _cells(run: dict[str, Any], first: dict[str, Any], learned: bool) -> list[str]:
    rounds, there, same = len(run["seconds"]), reached(run, first), len(first["seconds"])
    moved = [run["up"][-1], run["down"][-1], total(run)]
    fewer = total(first) / same * rounds / moved[-1] if moved[-1] else None
    cells = [run["system"], str(rounds), *(f"{value:.4g}" for value in moved)]
    cells += ["" if fewer is None else f"{fewer:.3g}", f"{a_round(run):.1f}", f"{on_link(run):.1f}"]
    if learned:
        cells += [
            f"{100 * run['accuracy'][same - 1]:.1f} %" if rounds >= same else "",
            "not reached" if there is None else f"{run['seconds'][there]:.0f} ({there + 1})",
            "" if there is None else f"{total(run, there):.4g}",
        ]
    return cells


def total(run: dict[str, Any], there: int = -1) -> float:
    """MB of both directions, until the end of a round."""
    return float(run["up"][there] + run["down"][there])


def a_round(run: dict[str, Any]) -> float:
    """Seconds of a round."""
    return float(run["seconds"][-1] / len(run["seconds"]))


def on_link(run: dict[str, Any]) -> float:
    """Seconds that a site's bytes of a round take at least on its link, down and then up."""
    return 8 * total(run) / SITES / len(run["seconds"]) / float(run["mbit"])


def sentences(runs: list[dict[str, Any]]) -> list[str]:
    """What the seconds say, at each rate, and what the first model costs."""
    of = {(run["mbit"], run["system"]): run for run in runs}
    training, per_round = a_round(of[RATE, ALONE]), total(of[RATE, FLOWER]) / len(of[RATE, FLOWER]["seconds"])
    lines = []
    for rate in sorted({run["mbit"] for run in runs}):
        flower, ours, deployed = (a_round(of[rate, name]) for name in (FLOWER, OURS, DEPLOYED))
        link = on_link(of[rate, DEPLOYED])
        whole = total(of[rate, FLOWER]) / len(of[rate, FLOWER]["seconds"]) > 0.99 * per_round
        least = "" if whole else "at least "
        lines.append(
            f"- **{rate:g} Mbit/s**: a round of Flower's FedAvg takes {least}{flower / ours:.1f} times as long as one "
            f"of the same app with two lines changed, and {flower / deployed:.1f} times as long as one of `fewbytes "
            "deploy`. "
            f"The latter takes {deployed / (training + link):.2f} times as long as training alone and its bytes over "
            f"the link together ({training:.1f} s and {link:.1f} s)."
        )
    more = of[RATE, WITHOUT]["down"][0] - of[RATE, OURS]["down"][0]
    lines.append(
        f"- **first**: without it, each site is sent the first model once, {more:.0f} MB more in all. Until the "
        f"target, that is {without_first(runs):.0f} MB in both directions; {FLOWER} moves "
        f"{total(of[RATE, FLOWER]):,.0f} MB."
    )
    return [line for text in lines for line in textwrap.wrap(text, 120, subsequent_indent="  ")]


def without_first(runs: list[dict[str, Any]]) -> float:
    """MB of both directions until the target, of ours where the first model is sent."""
    of = {run["system"]: run for run in runs if run["mbit"] == RATE}
    there = reached(of[OURS], of[FLOWER])
    return total(of[OURS], -1 if there is None else there) + of[WITHOUT]["down"][0] - of[OURS]["down"][0]


def reached(run: dict[str, Any], first: dict[str, Any]) -> int | None:
    """The first round (from 0) whose model is as accurate as the first run's last, less the margin."""
    target = first["accuracy"][-1] - MARGIN
    return next((r for r, accuracy in enumerate(run["accuracy"]) if accuracy >= target), None)


def target(of: dict[str, dict[str, Any]]) -> str:
    """The accuracy to reach, of runs by system."""
    return f"{100 * (of[FLOWER]['accuracy'][-1] - MARGIN):.1f} %"


def pages(runs: list[dict[str, Any]]) -> dict[Path, str]:
    """docs/links.md, README and the front page with their tables."""
    rates = sorted({run["mbit"] for run in runs}, key=lambda rate: (rate != RATE, -rate))
    at = {rate: [run for run in runs if run["mbit"] == rate and run["system"] != WITHOUT] for rate in rates}
    tables = [f"{rate:g} Mbit/s each way:\n\n{table(at[rate], learned=rate == RATE)}" for rate in rates]
    first, ours = (next(r for r in runs if (r["mbit"], r["system"]) == (RATE, name)) for name in (FLOWER, OURS))
    there = reached(ours, first)
    fewer = total(first) / total(ours, -1 if there is None else there)
    texts = {
        path: re.sub(rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", rf"\g<1>{text}\n\g<2>", path.read_text(), flags=re.S)
        for path, mark, text in [
            (ROOT / "docs" / "links.md", "measured", "\n\n".join([*tables, "\n".join(sentences(runs))])),
            (ROOT / "README.md", "links", _short(runs)),
            (ROOT / "docs" / "index.md", "links", _short(runs)),
        ]
    }
    claim = rf"{fewer:.0f}\1"
    texts = {path: re.sub(r"\d+( times fewer bytes than Flower's)", claim, text) for path, text in texts.items()}
    both = f"then {without_first(runs):.0f} MB instead of {total(ours, -1 if there is None else there):.0f}"
    return {path: re.sub(r"then \d+ MB instead of \d+", both, text) for path, text in texts.items()}


def _short(runs: list[dict[str, Any]]) -> str:
    """README's table."""
    of = {run["system"]: run for run in runs if run["mbit"] == RATE}
    first = of[FLOWER]
    lines = [f"| to {target(of)} accuracy | MB, both directions | minutes | rounds |", "| --- | ---: | ---: | ---: |"]
    for system in SHOWN:
        run, there, mark = of[system], reached(of[system], first), "**" if system == OURS else ""
        cells = [NAMED.get(system, system), "not reached", "", ""]
        if there is not None:
            cells[1:] = [f"{total(run, there):,.0f}", f"{run['seconds'][there] / 60:.1f}", str(there + 1)]
        lines.append("| " + " | ".join(f"{mark}{cell}{mark}" if cell else "" for cell in cells) + " |")
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]], dark: bool) -> None:
    """Accuracy over minutes, a line a system."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ink = "#e6edf3" if dark else "#24292f"
    inks = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    style: dict[Any, Any] = dict.fromkeys(inks, ink) | {
        "svg.fonttype": "none", "svg.hashsalt": "fewbytes", "font.size": 10, "font.family": "sans-serif",
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    of = {run["system"]: run for run in runs if run["mbit"] == RATE}
    with mpl.rc_context(style):
        figure = Figure(figsize=(7.6, 3.0), layout="constrained")
        axes = figure.add_subplot()
        for system, colour in SHOWN.items():
            run = of[system]
            minutes, percent = [t / 60 for t in run["seconds"]], [100 * value for value in run["accuracy"]]
            there = reached(run, of[FLOWER])
            moved = total(run, -1 if there is None else there)
            label = f"{NAMED.get(system, system).strip('`')}: {moved:,.0f} MB to {target(of)}"
            axes.plot(minutes, percent, "o-", color=colour, linewidth=2, markersize=4, label=label)
        axes.set_xlabel(f"minutes at {RATE:g} Mbit/s")
        axes.set_ylabel("accuracy, %")
        axes.set_ylim(0)
        axes.set_xlim(0)
        axes.legend(loc="lower right", frameon=False, labelcolor="linecolor")
        path = ROOT / "docs" / "pictures" / f"links-{'dark' if dark else 'light'}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    """Take new figures in, and write all."""
    found = {(run["mbit"], run["system"]): run for run in json.loads(FIGURES.read_text())} if FIGURES.exists() else {}
    for line in Path(sys.argv[1]).read_text().splitlines():
        run = json.loads(line)
        found[run["mbit"], run["system"]] = run
    runs = list(found.values())
    FIGURES.write_text(json.dumps(runs, indent=1) + "\n")
    for path, text in pages(runs).items():
        path.write_text(text)
    for dark in (False, True):
        draw(runs, dark)


if __name__ == "__main__":
    main()
