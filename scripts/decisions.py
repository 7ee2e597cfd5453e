"""Runs every method on one task and writes what came of it: the tables of "which method for what".

    python scripts/decisions.py           # two hours; writes docs/decisions.json and the tables
    python scripts/decisions.py NAME ...  # these methods alone, beside the figures that are there
    python scripts/decisions.py --tables  # writes the tables again, from docs/decisions.json
    python scripts/cards.py               # then: each method's figure, and the list of methods

The task: digits, 10 clients, Dirichlet alpha 1, ResNet-8 of width 8 with a 3x3 stem, 20 rounds, three seeds; all
methods train alike, as `fewbytes compare all --set momentum=0` has them. Accuracies are the mean of the last five
rounds, as some curves swing; of methods with rounds of their own, or that change their models after the last, the last.
What cannot train that model is measured on CHAIN, beside FedAvg and training alone.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fewbytes.experiments.catalogue import KINDS, about
from fewbytes.methods import METHODS

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "decisions.json"
SEEDS = (1, 2, 3)
LAST = 5  # rounds, whose mean is taken
TASK = ["--dataset", "digits", "--clients", "10", "--alpha", "1", "--rounds", "20"]
MODEL, CHAIN = "resnet8:width=8,stem=3x3", "mlp"
ONLY_CHAINS = ["fedma"]
TERMS = ["--set", "momentum=0"]
ALIKE = [
    f"--set={term}" for term in ("epochs=2", "fedma.epochs=40", "fedma.layers=2", "lr=0.1", "batch=20", "momentum=0")
]
EQUAL = [f"--set={term}" for term in ("epochs=2", "steps=0", "lr=0.1", "batch=20", "momentum=0")]
"""The terms of local training that `compare all` gives every method, for one that is measured alone."""
OWN = {"diloco": [f"--set={term}" for term in ("epochs=2", "steps=0", "lr=0.001", "batch=20")]}
"""Settings of methods whose optimiser needs another learning rate, AdamW here; the others are as for all."""
Run = dict[str, Any]
"""What came of one seed: accuracies of the clients' own models and of the one for all (absent: there is none), MB up
and down; `rounds`: of each scored round MB up and down so far (down: None if it was not recorded), own, shared."""


def measured(names: list[str], options: list[str]) -> dict[str, list[Run]]:
    """By method, a run of each seed for which it did not fail; why is said on standard error."""
    found: dict[str, list[Run]] = {}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as name:
            command = [sys.executable, "-m", "fewbytes", "compare", *names, *TASK, *options, "--seed", str(seed)]
            done = subprocess.run([*command, "--out", name, "--json"], stdout=subprocess.PIPE, text=True, check=False)
            for result in json.loads(done.stdout):
                if "score" in result:
                    rows = next(Path(name).glob(f"*/{result['method']}/rounds.jsonl")).read_text("utf-8").splitlines()
                    found.setdefault(result["method"], []).append(of_one(result, [json.loads(row) for row in rows]))
    return found


def of_one(result: dict[str, Any], rows: list[dict[str, Any]]) -> Run:
    kinds, rounds, up, down = result["score"]["all"], [], 0, 0
    for row in rows:
        up, down = up + row["uplink_bytes"], down + row["downlink_bytes"]
        scores = row.get("scores", {}).get("accuracy", {})
        if scores:
            sent = round(up / 1e6, 4), round(down / 1e6, 4)
            rounds.append([*sent, *(_short(scores.get(key)) for key in ("personalised", "global"))])
    method = METHODS[result["method"]]()
    swings = not method.own_rounds and not method.promises.scored_after_finish

    def settled(kind: str, column: int) -> float | None:
        values = [row[column] for row in rounds[-LAST:] if row[column] is not None]
        final = kinds.get(kind, {}).get("final")
        return _short(fmean(values) if swings and values and final is not None else final)

    return {
        "own": settled("personalised", 2),
        "shared": settled("global", 3),
        "up": result["uplink_bytes"] / 1e6,
        "down": result["downlink_bytes"] / 1e6,
        "rounds": rounds,
    }


def _short(score: float | None) -> float | None:
    return None if score is None else round(score, 5)


def both(run: Run) -> float:
    """MB of a run, up and down together."""
    return float(run["up"] + run["down"])


def row(name: str, runs: list[Run], link: str) -> str:
    """A row of a table: means over the seeds, of accuracies with their standard deviation, in points."""
    lacking = "" if len(runs) == len(SEEDS) else f" ({len(runs)} of {len(SEEDS)} seeds: else it diverged)"
    cells = [f"[`{name}`]({link.format(name)}){lacking}"]
    for key in ("own", "shared"):
        values = [run[key] for run in runs if run[key] is not None]
        swing = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
        cells.append(f"{fmean(values):.1%}{swing}" if values else "")
    cells += [f"{fmean(run[key] for run in runs):.3g}" for key in ("up", "down")]
    cells.append(f"{fmean(map(both, runs)):.3g}")
    return f"| {' | '.join(cells)} |"


def table(found: dict[str, list[Run]], names: list[str], link: str) -> list[str]:
    heads = ["method", "each client's own model", "global model", "MB up", "MB down", "MB both"]
    return [
        f"| {' | '.join(heads)} |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *(row(name, found[name], link) for name in names),
    ]


def marked(path: Path, lines: list[str]) -> str:
    """The text of a file with these lines between its marks."""
    block = "<!-- measured -->\n" + "\n".join(lines) + "\n<!-- /measured -->"
    return re.sub("<!-- measured -->.*<!-- /measured -->", lambda _: block, path.read_text("utf-8"), flags=re.DOTALL)


def pages(found: dict[str, list[Run]]) -> dict[Path, str]:
    """docs/which.md with its tables: one for each kind of methods, by what clients send."""
    lines: list[str] = []
    for kind, meaning in KINDS.items():
        names = [name for name in found if about(name, METHODS[name]).kind == kind]
        names.sort(key=lambda name: fmean(map(both, found[name])))
        lines += [f"### {kind[0].upper()}{kind[1:]}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
        lines += [*table(found, names, "methods/{}.md"), ""]
    which = ROOT / "docs" / "which.md"
    return {which: marked(which, lines[:-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="measure these methods alone")
    parser.add_argument("--tables", action="store_true", help="from the figures that are there")
    asked = parser.parse_args()
    if asked.names:
        found = json.loads(FIGURES.read_text("utf-8"))
        for name in asked.names:
            found[MODEL] |= measured([name], ["--model", MODEL, *EQUAL, *OWN.get(name, [])])
        FIGURES.write_text(json.dumps(found) + "\n", "utf-8")
    elif not asked.tables:
        found = {
            MODEL: measured(["all"], ["--model", MODEL, *TERMS]),
            CHAIN: measured([*ONLY_CHAINS, "fedavg", "separate"], ["--model", CHAIN, *ALIKE]),
        }
        for name, terms in OWN.items():
            found[MODEL] |= measured([name], ["--model", MODEL, *TERMS, *terms])
        FIGURES.write_text(json.dumps(found) + "\n", "utf-8")
    for path, text in pages(json.loads(FIGURES.read_text("utf-8"))[MODEL]).items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
