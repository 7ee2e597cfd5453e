"""The five systems, and FedAvg, with both directions rounded: accuracy and bytes beside their own without it.

    python benchmarks/paper/lossy_systems.py [--bits 8 4 2 1 0.5] [--seeds 1 2 3] [--methods fusefl …]

Each of the five as `fewbytes run NAME` has it on the digits: ten clients, Dirichlet 0.5, terms that take seconds;
FedAvg with Dirichlet 0.3 and terms of its own. Accuracy is of the kind the paper reports, in the last round, the mean
over seeds ± their standard deviation; MB are the frames' bytes of the whole run, of all clients; bits a value and
error (squared error over squared norm) are of replies' rounded values, the mean over the rounds.
"""

from __future__ import annotations

import argparse
from statistics import fmean, pstdev
from typing import Any

import fewbytes as fb
from fewbytes.engines.handlers import UP_BITS, UP_ERROR
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find

METHODS = {"genefl": 15, "fedpurin": 15, "fedkgf": 20, "fusefl": 4, "fedktl": 15, "fedavg": 20}
"""Rounds by method; FuseFL has a number of its own."""
SETTINGS: dict[str, dict[str, Any]] = {"fedavg": {"alpha": 0.3, "parameters": {"epochs": 2, "lr": 0.2, "batch": 20}}}
COLUMNS = [
    "`--bits`", "bits a value up", "rounding error", "accuracy", "MB up", "MB down", "MB both",
    "times fewer bytes than `none`, both",
]  # fmt: skip


def run(name: str, seed: int, bits: float | None, workers: int | None) -> fb.Result:
    experiment = make_experiment({"method": name, "seed": seed, **SETTINGS.get(name, {})})
    settings: dict[str, Any] = {} if bits is None else {"bits": bits}
    return fb.run(
        experiment.build_method(),
        find(experiment).task,
        rounds=METHODS[name],
        workers=workers,
        save_models=False,
        **settings,
    )


def measured(results: list[fb.Result], what: str) -> float | None:
    """The mean over rounds and seeds of a measure; None if nothing was rounded."""
    found = [row["measured"][what] for result in results for row in result.rounds if what in row.get("measured", {})]
    return fmean(found) if found else None


def row(results: list[fb.Result], bits: float | None, whole: float | None) -> tuple[list[str], float]:
    """A row of the table, and its MB of both directions; `whole`: those without rounding."""
    scores = [100 * result.accuracy for result in results]
    up, down = (
        fmean(sum(r[f"{way}link_bytes"] for r in one.rounds) for one in results) / 1e6 for way in ("up", "down")
    )
    rate, error = measured(results, UP_BITS), measured(results, UP_ERROR)
    cells = [
        "none" if bits is None else f"{bits:g}",
        "" if rate is None else f"{rate:.2f}",
        "" if error is None else f"{error:.2g}" if error >= 0.001 else "< 0.001",
        f"{fmean(scores):.1f} ± {pstdev(scores):.1f} %",
        *(f"{each:.3f}" for each in (up, down, up + down)),
        f"{(whole or up + down) / (up + down):.1f}",
    ]
    return cells, up + down


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=float, nargs="+", default=[8, 4, 2, 1, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    for name in args.methods:
        print(f"\n{name}\n\n| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|")
        whole: float | None = None
        for bits in (None, *args.bits):
            cells, both = row([run(name, seed, bits, args.workers) for seed in args.seeds], bits, whole)
            whole = whole or both
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
