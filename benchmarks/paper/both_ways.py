"""Bytes of whole runs, up, down and both, by how finely both directions are rounded (docs/lossy.md).

    python benchmarks/paper/both_ways.py [--dataset mnist] [--seeds 1 2 3] [--bits 2 1 0.5 0.3] [--settings "all of 10"]

FedAvg with an MLP, Dirichlet 0.3: all of ten clients for 20 rounds; 3 of 10 for 20; 3 of 30 for 100. Accuracies are the
global model's, means of the last three rounds and of the seeds, ± the seeds' standard deviation; MB = 10^6 bytes of
frames, of all clients together; the last column is the lossless run's total over a row's. MNIST (FEWBYTES_DATA) is cut
to 3,000 training images.
"""

from __future__ import annotations

import argparse
import warnings
from statistics import fmean, pstdev
from typing import Any

import fewbytes as fb
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.models.build import ModelBuilder

SETTINGS = {"all of 10": (10, 1.0, 20), "3 of 10": (10, 0.3, 20), "3 of 30": (30, 0.1, 100)}
METHOD = fb.FedAvg(epochs=2, lr=0.2, batch=20)
TRAINING = 3000  # images of MNIST


def measured(dataset: Any, setting: tuple[int, float, int], seed: int, rounding: dict[str, float]) -> list[float]:
    """Accuracy, and MB up and down, of one run."""
    clients, fraction, rounds = setting
    data = federate(dataset, Partition("dirichlet", clients, alpha=0.3), seed)
    task = fb.Task.on(data, ModelBuilder("mlp", dataset.train.shape, len(dataset.classes)), seed=seed)
    result = fb.run(METHOD.changed(fraction=fraction), task, rounds=rounds, save_models=False, **rounding)
    scores = [row["scores"]["accuracy"]["global"] for row in result.rounds if row["phase"] == "round"]
    moved = result.ledger.columns()
    return [100 * fmean(scores[-3:]), moved["bytes_up"].sum() / 1e6, moved["bytes_down"].sum() / 1e6]


def main() -> None:
    """Print a table for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="digits", choices=["digits", "mnist"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--bits", type=float, nargs="+", default=[2, 1, 0.5, 0.3])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    dataset = load_dataset(given.dataset)
    if given.dataset == "mnist":
        dataset = dataset.part(TRAINING / len(dataset.train), 0)
    rows: dict[str, dict[str, float]] = {"none": {}, "up 0.5 alone": {"uplink_bits": 0.5, "downlink_bits": 32}}
    rows |= {f"{bits:g}": {"bits": bits} for bits in given.bits}
    for title in given.settings:
        head = "| `--bits` | accuracy | MB up | MB down | MB both | times fewer bytes than `none`, both |"
        print(f"\n{title}\n\n{head}\n{'| --- ' * 6}|")
        lossless = 0.0
        for name, rounding in rows.items():
            found = [measured(dataset, SETTINGS[title], seed, rounding) for seed in given.seeds]
            accuracy, up, down = (fmean(each) for each in zip(*found, strict=True))
            spread = pstdev(each[0] for each in found)
            lossless = lossless or up + down
            cells = f"{accuracy:.1f} ± {spread:.1f} %", f"{up:.3f}", f"{down:.3f}", f"{up + down:.3f}"
            print(f"| {name} | {' | '.join(cells)} | {lossless / (up + down):.1f} |", flush=True)


if __name__ == "__main__":
    main()
