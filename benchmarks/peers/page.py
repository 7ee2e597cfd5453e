"""Writes the tables of docs/agreement.md, and a line in each method's page, from docs/agreement.json.

python benchmarks/peers/page.py
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
FIGURES = DOCS / "agreement.json"
PEERS = {"pfllib": "PFLlib", "htfllib": "HtFLlib", "fedktl": "FedKTL's code", "fusefl": "FuseFL's code"}
WAYS = {"sent": "as sent, pooled", "trained": "after training, mean of clients"}
ROUNDING = 1e-5
"""Differences below are of floats' rounding; values are parts of the model's largest."""
T_975 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""The 97.5 % point of Student's t, for this number of differences."""
Found = Mapping[str, Any]


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """The mean of paired differences, and half of its 95 % interval."""
    n = len(differences)
    return fmean(differences), T_975[n] * stdev(differences) / math.sqrt(n)


def same(row: Found) -> str:
    """The cell of equal batches."""
    if "same" not in row:
        return "not run"
    if row["same"] is None:
        return "drawn at random"
    both = [abs(ours - theirs) for ours, theirs in row["same_scores"].values()]
    known = f"scores {'too' if max(both) < ROUNDING else f'up to {100 * max(both):.2g} points apart'}"
    if row["changed"]:
        known += "; a part changed"
    if "server" in row:
        known += f"; the server's alignment {row['server']:.0e}"
    return f"equal ({row['same']:.1g}), {known}" if row["same"] < ROUNDING else f"**{row['same']:.1g} apart**, {known}"


def scores(row: Found, way: str) -> str:
    """The cell of three seeds: ours, theirs, and the difference in points."""
    if "seeds" not in row:
        return "not run"
    pairs = [seed[way] for seed in row["seeds"]]
    mean, half = interval([ours - theirs for ours, theirs in pairs])
    text = f"{100 * mean:+.1f} ± {100 * half:.1f}"
    ours, theirs = (fmean(pair[side] for pair in pairs) for side in (0, 1))
    return f"{ours:.1%}, {theirs:.1%}: {text if abs(mean) <= half else f'**{text}**'}"


def table(found: Found) -> list[str]:
    lines = [
        f"| method | peer | equal batches | {' | '.join(WAYS.values())} |",
        "| --- | --- | --- | --- | --- |",
    ]
    names = dict.fromkeys(name for peer in PEERS for name in found.get(peer, {}).get("rows", {}))
    for name in sorted(names):
        for peer, called in PEERS.items():
            row = found.get(peer, {}).get("rows", {}).get(name)
            if row is not None:
                cells = [f"[`{name}`](methods/{name}.md)", called, same(row), *(scores(row, way) for way in WAYS)]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def versions(found: Found) -> list[str]:
    terms = found["terms"]
    commits = [f"{called} at commit `{found[peer]['commit'][:12]}`" for peer, called in PEERS.items() if peer in found]
    return [
        f"{' and '.join(commits)}.",
        f"Digits, {terms['clients']} clients, Dirichlet alpha {terms['alpha']}; two convolutions, two linear layers.",
        f"Three seeds: {terms['rounds']} rounds of one epoch, learning rate {terms['lr']}.",
        f"Equal batches: {terms['same_rounds']} rounds of one epoch, learning rate {terms['same_lr']}.",
        f"Batches of {terms['batch']}; all clients take part in each round.",
        *(of_fusefl(found["fusefl"]["terms"]) if "fusefl" in found else []),
    ]


def of_fusefl(terms: Mapping[str, Any]) -> list[str]:
    """FuseFL's own terms."""
    side = terms["side"]
    return [
        "",
        f"FuseFL's code: images of CIFAR-10, halved to {side} x {side}; {terms['clients']} clients, Dirichlet alpha "
        f"{terms['alpha']}.",
        f"ResNet-18 of width {terms['width']} in {terms['blocks']} blocks, batches of {terms['batch']}, momentum 0.9, "
        f"{terms['drawn']:,} virtual features a class.",
        f"Three seeds: {terms['train']:,} training and {terms['test']:,} test images, {terms['epochs']} epochs a "
        f"stage, learning rate {terms['lr']}.",
        f"Equal batches: {terms['same_train']} training and {terms['same_test']} test images, {terms['same_epochs']} "
        f"epoch a stage, learning rate {terms['same_lr']}.",
    ]


def line(found: Found, name: str) -> str:
    """What a method's page says."""
    parts = []
    for peer, called in PEERS.items():
        row = found.get(peer, {}).get("rows", {}).get(name)
        if row is not None:
            lines = [f"{way}: {scores(row, key)} points" for key, way in WAYS.items() if "seeds" in row]
            parts.append("; ".join([f"{called}, on the same batches: {same(row)}", *lines]))
    return f"**Compared with other code** ([agreement](../agreement.md)). {'. '.join(parts)}."


def marked(text: str, mark: str, lines: Sequence[str]) -> str:
    """The text with these lines between the marks of this name."""
    block = "\n".join([f"<!-- {mark} -->", *lines, f"<!-- /{mark} -->"])
    return re.sub(f"<!-- {mark} -->.*<!-- /{mark} -->", lambda _: block, text, flags=re.DOTALL)


def pages(found: Found) -> dict[Path, str]:
    """The documents with what was found."""
    path = DOCS / "agreement.md"
    written = {path: marked(marked(path.read_text("utf-8"), "measured", table(found)), "versions", versions(found))}
    for name in dict.fromkeys(name for peer in PEERS for name in found.get(peer, {}).get("rows", {})):
        card = DOCS / "methods" / f"{name}.md"
        text = card.read_text("utf-8")
        if "<!-- agreement -->" not in text:
            text = text.rstrip("\n") + "\n\n<!-- agreement -->\n<!-- /agreement -->\n"
        written[card] = marked(text, "agreement", [line(found, name)])
    return written


if __name__ == "__main__":
    for path, text in pages(json.loads(FIGURES.read_text("utf-8"))).items():
        path.write_text(text, "utf-8")
