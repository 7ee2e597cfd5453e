"""Five situations, and the method made for each beside training alone, FedAvg and baselines: docs/situations.md.

    python benchmarks/situations.py                  # all that is missing in --out; 10 minutes on two cores
    python benchmarks/situations.py one-exchange     # this situation alone, beside the figures that are there
    python benchmarks/situations.py --tables         # the tables again, from docs/situations.json

A situation is a few calls of `fewbytes compare` with the same options, each in a folder of its own below --out. A
finished run is not run again, and an interrupted one is resumed. Learning rates are chosen by `compare`, for each
method from the same grid, on validation data of the first seed. The sentences below a table are computed from its runs.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from decisions import LAST, SEEDS, Run, both, of_one

DOCS = Path(__file__).parents[1] / "docs"
FIGURES, PAGE = DOCS / "situations.json", DOCS / "situations.md"
README = DOCS.parent / "README.md"
ALONE, FEDAVG = "separate", "fedavg"
AHEAD, CLOSE, BEHIND = "ahead of", "too close to tell from", "behind"
HOWS = {AHEAD: " with every seed", CLOSE: "", BEHIND: " with every seed"}
"""How a method compares with others, and what follows their names."""
Found = dict[str, dict[str, list[Run]]]
"""By situation and row, a run of each seed."""


@dataclass(frozen=True)
class Calls:
    """One call of `fewbytes compare`: methods, options beside the situation's, and what a row's name has of these."""

    methods: str
    options: str = ""
    named: str = ""

    def row(self, method: str) -> str:
        return f"{method}, {self.named}" if self.named else method


@dataclass(frozen=True)
class Situation:
    """`when` one has it, in README's and in the page's words; `system`: the row of the method made for it; `score`:
    what the rows are compared by, own models or the shared one; `options`: of all calls."""

    key: str
    when: str
    system: str
    score: str
    options: str
    calls: Sequence[Calls]

    def command(self, number: int, folder: str) -> list[str]:
        call, seeds = self.calls[number], ",".join(map(str, SEEDS))
        options = shlex.split(f"{call.options} {self.options}")
        return ["compare", *call.methods.split(), *options, "--seeds", seeds, "--resume", folder]

    @property
    def method(self) -> str:
        """The system's short name."""
        return self.system.partition(",")[0]


DIGITS = "--dataset digits --model resnet8:width=8,stem=3x3 --set last=kept --set momentum=0.9 --set batch=20"
SITUATIONS = [
    Situation(
        "join-later",
        "clients join later",
        "genefl",
        "own",
        f"{DIGITS} --clients 6 --newcomers 6 --arrival 11 --rounds 15 --partition shards --shards-per-client 4 "
        "--test held-classes --samples 60/60 --set fraction=1 --set epochs=5 --set lr=0.02",
        [
            Calls(
                "genefl separate fedavg fedbn learngene",
                "--set genefl.gamma_step=1 --set genefl.clusters=1 --set genefl.batch_norm=layer",
            )
        ],
    ),
    Situation(
        "personal",
        "each client needs its own model",
        "fedpurin",
        "own",
        f"{DIGITS} --clients 8 --alpha 0.5 --samples 40/80 --rounds 20 --set epochs=5 --set lr=0.05",
        [Calls("fedpurin separate fedavg fedbn fedper", "--set fedpurin.beta=10")],
    ),
    Situation(
        "small-uplink",
        "uploads must be tiny",
        "fedkgf, 0.5 bits up",
        "own",
        "--dataset digits --model resnet8:width=16,stem=3x3 --set last=kept --set momentum=0 --set batch=20 "
        "--clients 10 --alpha 1 --samples 60/36 --rounds 16 --set lr=0.1",
        [
            Calls("fedkgf", "--uplink-bits 0.5 --budget 35kB --set epochs=6", "0.5 bits up"),
            Calls("separate", "--set epochs=6"),
            Calls("fedavg fedbn fedper", "--uplink-bits 0.1 --budget 35kB --set epochs=20", "0.1 bits up"),
        ],
    ),
    Situation(
        "one-exchange",
        "a model is sent only once",
        "fusefl",
        "shared",
        f"{DIGITS} --clients 10 --alpha 0.3 --samples 60/36 --set lr=0.05",
        [
            Calls("fusefl ensemble separate fedavg", "--rounds 1 --set epochs=40"),
            Calls("fedavg", "--rounds 5 --set epochs=8", "5 rounds"),
        ],
    ),
    Situation(
        "models-differ",
        "models differ",
        "fedktl",
        "own",
        "--dataset digits --clients 9 --alpha 0.3 --samples 30/40 --set last=kept --set momentum=0 --set batch=10 "
        "--model mlp@64+resnet4:width=8,stem=3x3@64+resnet8:width=8,stem=3x3@64 "
        "--rounds 15 --set epochs=2 --tune lr=0.01,0.1",
        [Calls("fedktl separate feddistill fedproto lg_fedavg")],
    ),
]


def called(method: str) -> str:
    """A method's usual name: the title of its page."""
    return (DOCS / "methods" / f"{method}.md").read_text("utf-8").partition("\n")[0].removeprefix("# ")


def measured(situation: Situation, out: Path) -> dict[str, list[Run]]:
    """Run what is missing of a situation's calls; by row, a run of each seed for which it did not fail."""
    found: dict[str, list[Run]] = {}
    for number, call in enumerate(situation.calls):
        folder = out / f"{situation.key}-{number + 1}"
        command = [sys.executable, "-m", "fewbytes", *situation.command(number, str(folder))]
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode:
            sys.exit(f"{situation.key}: a run has failed (see above); no figures are written")
        for place in sorted(folder.glob("*-seed-*/result.json")):
            result = json.loads(place.read_text("utf-8"))
            lines = place.with_name("rounds.jsonl").read_text("utf-8").splitlines()
            if result["status"] == "done":
                found.setdefault(call.row(result["method"]), []).append(of_seed(result, list(map(json.loads, lines))))
    return found


def of_seed(result: dict[str, Any], rows: list[dict[str, Any]]) -> Run:
    """What came of one seed; `paper`: the mean of the last scored rounds by the kind of accuracy that the method's
    paper reports, if it is another than those of the table's columns."""
    run, kind = of_one(result, rows), result["score"]["kind"]
    del run["rounds"]  # of figures, which this page has none of
    if result["rounds"] < 2 * LAST:  # these still rise
        final = {name: scores["final"] for name, scores in result["score"]["all"].items()}
        run |= {"own": final.get("personalised"), "shared": final.get("global")}
    scored = [row["scores"]["accuracy"] for row in rows if row.get("scores", {}).get("accuracy")]
    last = [each[kind] for each in scored if kind in each][-LAST:]
    return run | {
        "seed": result["seed"],
        "paper": None if kind in ("personalised", "global") else round(fmean(last), 5),
    }


def points(runs: Sequence[Run], key: str) -> str:
    """The mean accuracy over seeds, ± their standard deviation in points; empty where there is none."""
    values = [run[key] for run in runs if run[key] is not None]
    return f"{fmean(values):.1%} ± {100 * stdev(values):.1f}" if len(values) > 1 else ""


def megabytes(runs: Sequence[Run], of: Callable[[Run], float]) -> str:
    return f"{fmean(map(of, runs)):.3g}"


def cells(runs: Sequence[Run]) -> list[str]:
    """Both accuracies, MB up, down and both."""
    sizes = [megabytes(runs, of) for of in (lambda run: run["up"], lambda run: run["down"], both)]
    return [points(runs, "own"), points(runs, "shared"), *sizes]


def table(situation: Situation, found: dict[str, list[Run]]) -> list[str]:
    """All rows: the system, training alone, FedAvg, then the others, the most accurate first."""
    lines = [
        "| method | each client's own model | global model | MB up | MB down | MB both |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    first = [situation.system, ALONE, *(row for row in found if row.partition(",")[0] == FEDAVG)]
    rest = sorted(found.keys() - first, key=lambda row: -mean(situation, found[row]))
    for row in [*first, *rest]:
        if row in found:
            method, comma, named = row.partition(",")
            name = f"[`{method}`](methods/{method}.md){comma}{named}"
            lacking = "" if len(found[row]) == len(SEEDS) else f" ({len(found[row])} of {len(SEEDS)} seeds)"
            text = f"**{name}**" if row == situation.system else name
            lines.append(f"| {' | '.join([text + lacking, *cells(found[row])])} |")
    return lines


def column(situation: Situation, *rows: Sequence[Run]) -> str:
    """What these rows are compared by: the situation's score, or the other one if a row has no such model."""
    score, other = situation.score, {"own": "shared", "shared": "own"}[situation.score]
    return score if all(run[score] is not None for runs in rows for run in runs) else other


def mean(situation: Situation, runs: Sequence[Run]) -> float:
    return fmean(run[column(situation, runs)] for run in runs)


def best(situation: Situation, found: dict[str, list[Run]]) -> str:
    """The most accurate row besides the system, training alone and FedAvg."""
    others = [row for row in found if row.partition(",")[0] not in (situation.method, ALONE, FEDAVG)]
    return max(others, key=lambda row: mean(situation, found[row]))


def apart(situation: Situation, ours: Sequence[Run], theirs: Sequence[Run]) -> list[float]:
    """By how many points ours are more accurate, seed by seed."""
    key = column(situation, ours, theirs)
    other = {run["seed"]: run[key] for run in theirs}
    return [100 * (run[key] - other[run["seed"]]) for run in ours if run["seed"] in other]


def against(situation: Situation, found: dict[str, list[Run]], row: str) -> tuple[str, str]:
    """How the system compares with a row, in two words, and in figures."""
    ours, theirs = found[situation.system], found[row]
    key, differences = column(situation, ours, theirs), apart(situation, ours, theirs)
    ahead, n = sum(difference > 0 for difference in differences), len(differences)
    whose = "" if key == situation.score else " by own models" if key == "own" else " by the global models"
    text = f"{fmean(differences):+.1f} ± {stdev(differences):.1f} points{whose}"
    if ahead in (0, n):
        how = AHEAD if ahead else BEHIND
        return how, f"{text}: {how.removesuffix(' of')} with every seed"
    return CLOSE, f"{text}: seeds differ ({ahead} of {n} ahead), too close to tell"


def shares(situation: Situation, found: dict[str, list[Run]], row: str) -> str:
    """The system's bytes as parts of a row's."""
    ours, theirs = (found[each] for each in (situation.system, row))
    parts = [
        f"{fmean(map(of, ours)) / whole:.2g} of its MB {way}"
        for way, of in (("up", lambda run: run["up"]), ("both ways", both))
        if (whole := fmean(map(of, theirs)))
    ]
    return f"; {', '.join(parts)}" if parts else ""


def verdict(situation: Situation, found: dict[str, list[Run]]) -> list[str]:
    """What the runs say, a line each: beside training alone, FedAvg and the best baseline, and whether it holds."""
    strongest = best(situation, found)
    named = {ALONE: "training alone", FEDAVG: "FedAvg"}
    beside = [ALONE, *(row for row in found if row.partition(",")[0] == FEDAVG), strongest]
    lines, hows = [], dict[str, list[str]]()
    for row in beside:
        method, comma, rest = row.partition(",")
        name = named.get(method, f"{called(method)}, the best baseline") + comma + rest
        how, text = against(situation, found, row)
        lines.append(f"- beside {name}: {text}{shares(situation, found, row)}")
        hows.setdefault(how, []).append(named.get(method, called(method)) + (f" ({rest.strip()})" if rest else ""))
    kind = "each client's own model" if situation.score == "own" else "the global model"
    parts = [f"{how} {together(hows[how])}{more}" for how, more in HOWS.items() if how in hows]
    if scored := points([run for run in found[situation.system] if run["paper"] is not None], "paper"):
        lines.append(f"- by its [paper's metric](methods/{situation.method}.md): {scored}")
    return [f"By {kind}, {called(situation.method)} is {', and '.join(parts)}:", "", *lines]


def together(names: Sequence[str]) -> str:
    """Names with "and" before the last."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def summary(found: Found) -> list[str]:
    """A row for each situation: what README shows, too."""
    heads = "situation | method | its accuracy | training alone | FedAvg | best baseline | MB up | MB both"
    lines = [
        f"| {heads} |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for situation in (each for each in SITUATIONS if each.key in found):
        rows, strongest = found[situation.key], best(situation, found[situation.key])
        fedavg = [row for row in rows if row.partition(",")[0] == FEDAVG]
        cells = [cell(situation, rows, [row]) for row in (situation.system, ALONE)]
        cells += [cell(situation, rows, fedavg) or "cannot run"]
        cells += [f"{cell(situation, rows, [strongest])}, {called(strongest.partition(',')[0])}"]
        moved = [
            f"{megabytes(rows[situation.system], of)}"
            + (f" (FedAvg {', '.join(megabytes(rows[row], of) for row in fedavg)})" if fedavg else "")
            for of in (lambda run: run["up"], both)
        ]
        lines.append(f"| {' | '.join([situation.when, called(situation.method), *cells, *moved])} |")
    return lines


def cell(situation: Situation, found: dict[str, list[Run]], rows: Sequence[str]) -> str:
    """The mean accuracies of rows by what the situation's rows are compared by; bold if that is more accurate than all
    others with every seed."""
    texts = []
    for row in rows:
        accuracy, part = mean(situation, found[row]), row.partition(",")[2]
        kind = "" if column(situation, found[row]) == situation.score else " (own models)"
        leads = all(min(apart(situation, found[row], found[other])) > 0 for other in found if other != row)
        text = f"**{accuracy:.1%}**" if leads else f"{accuracy:.1%}"
        texts.append(f"{text}{f' ({part.strip()})' if part else ''}{kind}")
    return ", ".join(texts)


def marked(text: str, mark: str, lines: Sequence[str]) -> str:
    """A page's text with these lines between its marks."""
    block = f"<!-- {mark} -->\n" + "\n".join(lines) + f"\n<!-- /{mark} -->"
    return re.sub(f"<!-- {mark} -->.*<!-- /{mark} -->", lambda _: block, text, flags=re.DOTALL)


def commands(situation: Situation) -> list[str]:
    """The calls as one types them; an option and its value are in one line."""
    lines = ["```sh"]
    for number in range(len(situation.calls)):
        words = shlex.join(["fewbytes", *situation.command(number, f"{situation.key}-{number + 1}")])
        whole = re.sub(r"(--\S+) (?!-)", "\\1\0", words)
        wrapped = textwrap.wrap(whole, 100, subsequent_indent="    ", break_on_hyphens=False)
        lines += " \\\n".join(wrapped).replace("\0", " ").splitlines()
    return [*lines, "```"]


def pages(found: Found) -> dict[Path, str]:
    """docs/situations.md with the tables of these figures between its marks, and README with the first of them."""
    text = marked(PAGE.read_text("utf-8"), "situations", summary(found))
    for situation in (each for each in SITUATIONS if each.key in found):
        rows = found[situation.key]
        lines = [*table(situation, rows), "", *verdict(situation, rows), "", *commands(situation)]
        text = marked(text, situation.key, lines)
    return {PAGE: text} | {
        path: marked(path.read_text("utf-8"), "situations", summary(found)) for path in (README, DOCS / "index.md")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", metavar="NAME", help=f"of {', '.join(each.key for each in SITUATIONS)}")
    parser.add_argument("--tables", action="store_true", help="from the figures that are there")
    parser.add_argument("--out", type=Path, default=Path("runs/situations"), help="the folder of the comparisons")
    asked = parser.parse_args()
    if strangers := set(asked.keys) - {each.key for each in SITUATIONS}:
        parser.error(f"no such situation: {min(strangers)}")
    found: Found = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}
    for situation in () if asked.tables else SITUATIONS:
        if not asked.keys or situation.key in asked.keys:
            found[situation.key] = measured(situation, asked.out)
            FIGURES.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    for path, text in pages(found).items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
