"""Measures the faults of `faults.py`, all or those whose numbers are given, and writes docs/hardening.md.

    python benchmarks/hardening [4 19]  (0: what guarding a run costs)

Each function runs in a process of its own with a limit of time. Results are kept in docs/hardening.json, of which the
page is made: rows that are not named stay as they were. FEWBYTES_LONG=1 measures more of everything, in hours;
FEWBYTES_NODE=stock deploys with Flower's SuperNodes instead of resident nodes.
`--measure durability.kills 4` calls one function with a count and prints its figures as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from faults import COSTS, FAULTS, Fault, Measure
from figures import Figure

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
LONG = bool(os.environ.get("FEWBYTES_LONG"))
Results = dict[str, dict[str, Any]]
"""By function: its figures, or why there are none, its count, seconds and versions."""


def measured(measure: Measure, long: bool = LONG) -> dict[str, Any]:
    """What a function comes to in a process of its own; of one that fails or takes too long the reason."""
    count, limit = (measure.long, 20 * measure.limit) if long else (measure.usual, measure.limit)
    command = [sys.executable, str(HERE), "--measure", measure.name, str(count)]
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        said, errors = "", f"it takes more than {limit:g} s"
    about = {"count": count, "seconds": round(time.monotonic() - started, 1), "fewbytes": version("fewbytes")}
    try:
        if process.returncode:
            raise ValueError
        return about | {"figures": [Figure(*each) for each in json.loads(said.splitlines()[-1])]}
    except (ValueError, IndexError, TypeError):
        last = [line for line in errors.splitlines() if line.strip()][-1:]
        return about | {"failed": last[0].strip()[:300] if last else f"exit code {process.returncode}"}


def figures_of(measures: Sequence[Measure], results: Mapping[str, Any]) -> list[Figure]:
    """The figures of functions; of one that failed one that says so."""
    found = []
    for measure in measures:
        result = results.get(measure.name)
        if result is None:
            found.append(Figure(measure.name, "not measured", "", None))
        elif "failed" in result:
            found.append(Figure(measure.name, f"failed: {result['failed']}", "", False))
        else:
            found += [Figure(*each) for each in result["figures"]]
    return found


def judged(fault: Fault, results: Mapping[str, Any]) -> str:
    """One of `not measured`, `met` and `not met`."""
    figures = figures_of(fault.measures, results)
    if all(figure.figure == "not measured" for figure in figures):
        return "not measured"
    return "not met" if any(figure.met is False for figure in figures) else "met"


def page(results: Mapping[str, Any], faults: Sequence[Fault] = FAULTS) -> str:
    """The report, in Markdown."""
    verdicts = {fault.number: judged(fault, results) for fault in faults}
    count = {verdict: [n for n, v in verdicts.items() if v == verdict] for verdict in verdicts.values()}
    met, missed, none = (count.get(verdict, []) for verdict in ("met", "not met", "not measured"))
    seconds = sum(result["seconds"] for result in results.values())
    lines = [
        "# Faults and attacks, measured",
        "",
        "What runs and deployments do when something fails or attacks them, measured, with the goal of each figure. "
        "`make hardening` measures all of it and makes this page. See the [threat model](threat-model.md) and the "
        "[glossary](glossary.md).",
        "",
        f"Of {len(faults)} kinds of faults, {len(met)} meet every goal, {len(missed)} do not{_listed(missed)}, and "
        f"{len(none)} are not measured{_listed(none)}. All measurements took {seconds / 60:.0f} minutes.",
        "",
        *_table(faults, results, "measures"),
        "",
        "## Not measured",
        "",
        *(f"- {fault.number}, {fault.name}: {fault.lacking}." for fault in faults if fault.lacking),
    ]
    costs = figures_of(COSTS, results)
    lines += ["", "## What it costs", "", "| | |", "| --- | --- |"]
    lines += [f"| {_cell(each.what)} | {_cell(each.figure)} |" for each in costs]
    stock = [fault for fault in faults if fault.stock]
    if stock:
        figures = [figure for fault in stock for figure in figures_of(fault.stock, results)]
        judged_ones = [figure for figure in figures if figure.met is not None]
        good = sum(bool(figure.met) for figure in judged_ones)
        lines += [
            "",
            "## The same with Flower's own FedAvg",
            "",
            f"{good} of {len(judged_ones)} figures meet the goal.",
            "",
            *_table(stock, results, "stock"),
        ]
    return "\n".join(lines) + "\n"


def _listed(numbers: Sequence[int]) -> str:
    return f" ({', '.join(map(str, numbers))})" if numbers else ""


def _table(faults: Sequence[Fault], results: Mapping[str, Any], which: str) -> list[str]:
    lines = ["| # | fault | what was measured | figure | goal | |", "| --- | --- | --- | --- | --- | --- |"]
    for fault in faults:
        figures = figures_of(getattr(fault, which), results) or [Figure("", "not measured", "", None)]
        for i, (what, figure, goal, met) in enumerate(figures):
            mark = {True: "met", False: "**not met**", None: ""}[met]
            cells = [str(fault.number), fault.name] if i == 0 else ["", ""]
            lines.append("| " + " | ".join(_cell(each) for each in (*cells, what, figure, goal)) + f" | {mark} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int, nargs="*", metavar="ROW")
    parser.add_argument("--measure", nargs=2, metavar=("FUNCTION", "COUNT"))
    options = parser.parse_args()
    options.rows = set(options.rows)
    if options.measure:
        module, function = options.measure[0].split(".")
        found = getattr(importlib.import_module(module), function)(int(options.measure[1]))
        print(json.dumps(found))
        return
    file = DOCS / "hardening.json"
    results: Results = json.loads(file.read_text()) if file.exists() else {}
    rows = {0: COSTS} | {fault.number: (*fault.measures, *fault.stock) for fault in FAULTS}
    unknown = options.rows - rows.keys()
    if unknown:
        parser.error(f"there is no row {min(unknown)}: they are 1 to {len(FAULTS)}, and 0 is what guarding costs")
    for number in sorted(options.rows) or rows:
        for measure in rows[number]:
            results[measure.name] = measured(measure)
            for what, figure, goal, met in figures_of([measure], results):
                mark = {True: "met", False: "NOT met", None: ""}[met]
                print(f"{number:>2} {what}: {figure}" + (f" (goal: {goal}) {mark}" if goal else ""), flush=True)
            file.write_text(json.dumps(dict(sorted(results.items())), indent=1, ensure_ascii=False) + "\n")
    (DOCS / "hardening.md").write_text(page(results))


if __name__ == "__main__":
    main()
