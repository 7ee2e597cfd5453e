"""Runs some methods on one task and writes what came of them: README's table, and the one of "which method for what".

    python scripts/decisions.py           # a few minutes; writes docs/decisions.json and the tables
    python scripts/decisions.py --tables  # writes the tables again, from docs/decisions.json

The task: digits, 10 clients, Dirichlet alpha 0.3, ResNet-8 of width 16, 20 rounds, two seeds; each method with the
terms that suit it, as `fewbytes compare` gives them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from fewbytes.experiments.catalogue import about
from fewbytes.methods import METHODS

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "decisions.json"
README = ["fedavg", "fedpurin", "fusefl", "genefl", "fedkgf", "fedktl"]
OTHERS = ["fedper", "feddistill", "scaffold", "dgc", "ensemble", "separate"]
SEEDS = (1, 2)
TASK = ["--dataset", "digits", "--clients", "10", "--alpha", "0.3", "--model", "resnet8:width=16", "--rounds", "20"]


def measured() -> dict[str, list[dict[str, float | None]]]:
    """By method, of each seed: final accuracies of the clients' own models and of the one for all, MB up and down."""
    found: dict[str, list[dict[str, float | None]]] = {}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "fewbytes", "compare", *README, *OTHERS, *TASK, "--seed", str(seed)]
            done = subprocess.run([*command, "--out", folder, "--json"], capture_output=True, text=True, check=True)
        for result in json.loads(done.stdout):
            kinds = result["score"]["all"]
            found.setdefault(result["method"], []).append(
                {
                    "own": kinds.get("personalised", {}).get("final"),
                    "shared": kinds.get("global", {}).get("final"),
                    "up": result["uplink_bytes"] / 1e6,
                    "down": result["downlink_bytes"] / 1e6,
                }
            )
    return found


def row(name: str, runs: list[dict[str, float | None]], kind: bool) -> str:
    """A row of a table: means over the seeds."""
    cells = [f"[`{name}`]({{cards}}{name}{{end}})"] + ([about(name, METHODS[name]).kind] if kind else [])
    for key in ("own", "shared"):
        values = [run[key] for run in runs if run[key] is not None]
        cells.append(f"{fmean(values):.1%}" if values else "")
    cells += [f"{fmean(run[key] or 0 for run in runs):.3g}" for key in ("up", "down")]
    return f"| {' | '.join(cells)} |"


def write(path: Path, lines: list[str]) -> None:
    """Put a table between the marks of a file."""
    text = path.read_text("utf-8")
    marked = "<!-- measured -->\n" + "\n".join(lines) + "\n<!-- /measured -->"
    path.write_text(re.sub("<!-- measured -->.*<!-- /measured -->", lambda _: marked, text, flags=re.S), "utf-8")


def tables(found: dict[str, list[dict[str, float | None]]]) -> None:
    """README's table, and that of docs/which.md."""
    heads = ["each client's own model", "one model for all", "MB up", "MB down"]
    for path, names, kind, place in (
        (
            ROOT / "README.md",
            [*README, "separate"],
            False,
            ("https://fewbytes.readthedocs.io/en/latest/methods/", ".html"),
        ),
        (ROOT / "docs" / "which.md", [*README, *OTHERS], True, ("methods/", ".md")),
    ):
        columns = ["method", *(["kind"] if kind else []), *heads]
        lines = [f"| {' | '.join(columns)} |", "| --- |" + (" --- |" if kind else "") + " ---: |" * len(heads)]
        lines += [
            row(name, found[name], kind).replace("{cards}", place[0]).replace("{end}", place[1]) for name in names
        ]
        write(path, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="from the figures that are there")
    if not parser.parse_args().tables:
        FIGURES.write_text(json.dumps(measured(), indent=1) + "\n", "utf-8")
    tables(json.loads(FIGURES.read_text("utf-8")))


if __name__ == "__main__":
    main()
