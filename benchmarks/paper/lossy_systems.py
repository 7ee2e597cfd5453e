"""The five systems, and FedAvg, with what their clients send rounded: accuracy and uplink beside their own without it.

    python benchmarks/paper/lossy_systems.py [--bits 8 4 2 1 0.5] [--seeds 1 2 3] [--methods fusefl …]

Each of the five as `fewbytes run NAME` has it on the digits: ten clients, Dirichlet 0.5, terms that take seconds;
FedAvg with Dirichlet 0.3 and terms of its own. Accuracy is of the kind the paper reports, in the last round, the mean
over seeds ± their standard deviation; `up` is the frames' bytes of the whole run, in kB = 1000 bytes; bits and NMSE
(squared error over squared norm) are of what was rounded, the mean over the rounds.
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


def run(name: str, seed: int, bits: float | None, workers: int | None) -> fb.Result:
    experiment = make_experiment({"method": name, "seed": seed, **SETTINGS.get(name, {})})
    settings = {} if bits is None else {"uplink_bits": str(bits), "downlink_bits": 32}
    return fb.run(
        experiment.build_method(),
        find(experiment).task,
        rounds=METHODS[name],
        workers=workers,
        save_models=False,
        **settings,
    )


def measured(results: list[fb.Result], what: str) -> str:
    found = [row["measured"][what] for result in results for row in result.rounds if what in row.get("measured", {})]
    return f"{fmean(found):8.3f}" if found else f"{'-':>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=float, nargs="+", default=[8, 4, 2, 1, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    print(f"{'method':10} {'bits':>5} {'accuracy':>14} {'up, kB':>9} {'fewer':>6} {'bits':>8} {'NMSE':>8}")
    for name in args.methods:
        whole = 0.0
        for bits in (None, *args.bits):
            results = [run(name, seed, bits, args.workers) for seed in args.seeds]
            scores = [100 * result.accuracy for result in results]
            up = fmean(sum(row["uplink_bytes"] for row in result.rounds) for result in results)
            whole = whole or up
            print(
                f"{name:10} {'all' if bits is None else f'{bits:g}':>5} {fmean(scores):6.2f} ± {pstdev(scores):5.2f} "
                f"{up / 1000:9.1f} {whole / up:5.1f}x {measured(results, UP_BITS)} {measured(results, UP_ERROR)}",
                flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main()
