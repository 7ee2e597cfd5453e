"""Does Fed-KGF's permuted upload train? Accuracy by how many local steps a round has, at equal steps in all.

    python benchmarks/paper/fedkgf_steps.py --out runs/steps [--seeds 0 1 2] [--picture docs/pictures/fedkgf-steps.png]

Digits, ten clients, of one main category each (80 % of their samples) or class-balanced; ResNet-8 of width 16 with 8
base kernels. Every run takes the same number of local steps, in rounds of `--lengths` of them, and without momentum,
which each round begins anew: runs differ only in what is uploaded, and when. Permuted upload is as published, or with
groups split again in each round; `common` averages what is common, `owners=0` everything; MB are 10^6 bytes that all
clients sent in the run. A run that is finished in --out is not run again. The picture needs matplotlib, which the extra
`detection` brings along.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import fewbytes as fb
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.experiments.run_folders import begun, finished
from fewbytes.models.build import ModelBuilder

UPLOADS: dict[str, dict[str, Any]] = {
    "permuted, as published": {},
    "permuted, regrouped": {"groups": "random"},
    "common": {"common": True},
    "averaged": {"owners": 0},
}
"""What clients upload, and the settings that say so."""
SPLITS = {"main-category": "80 % main category", "balanced": "class-balanced IID"}


def make_task(args: argparse.Namespace, split: str, seed: int) -> fb.Task:
    dataset = load_dataset("digits")
    data = federate(dataset, Partition(split, args.clients), seed=seed)
    return fb.Task.on(data, ModelBuilder(args.model, dataset.train.shape, len(dataset.classes)), seed=seed)


def result_of(args: argparse.Namespace, split: str, upload: str, length: int, seed: int) -> tuple[float, float]:
    """Accuracy at the end, percent, and MB sent, of a run that is made unless it is there."""
    folder = args.out / f"{split}-{upload.replace(', ', '-').replace(' ', '-')}-{args.steps}-{length}-{seed}"
    rounds = args.steps // length
    if not finished(folder):
        method = fb.FedKGF(base=8, lr=args.lr, lr_rounds=0, momentum=0.0, batch=20, steps=length, **UPLOADS[upload])
        fb.run(
            method, make_task(args, split, seed), rounds=rounds, out=folder, workers=1, evaluate_every=rounds,
            save_models=False, resume=begun(folder),
        )  # fmt: skip
    result = json.loads((folder / "result.json").read_text())
    return 100 * result["score"]["final"], result["uplink_bytes"] / 1e6


def draw(found: dict[tuple[str, str, int], tuple[list[float], float]], path: Path) -> None:
    """Accuracy over local steps a round, and over what was sent; a line an upload, each seed a point."""
    import matplotlib.pyplot as plt

    splits = list(dict.fromkeys(split for split, _, _ in found))
    figure, axes = plt.subplots(len(splits), 2, figsize=(10, 3.6 * len(splits)), sharey=True, squeeze=False)
    for (split, row), (column, place) in product(zip(splits, axes, strict=True), enumerate(("steps", "MB"))):
        ax = row[column]
        for upload in dict.fromkeys(upload for _, upload, _ in found):
            here = [(length, *of) for (s, u, length), of in found.items() if (s, u) == (split, upload)]
            across = [length if place == "steps" else sent for length, _, sent in here]
            (line,) = ax.plot(across, [fmean(accuracies) for _, accuracies, _ in here], marker="o", ms=4, label=upload)
            for x, (_, accuracies, _) in zip(across, here, strict=True):
                ax.plot([x] * len(accuracies), accuracies, ".", color=line.get_color(), ms=4, alpha=0.5)
        ax.set_xscale("log", base=2 if place == "steps" else 10)
        if place == "steps":
            ax.set_xticks(lengths := sorted({length for _, _, length in found}), [str(length) for length in lengths])
        ax.set_title(SPLITS[split])
        ax.set_xlabel("local steps a round" if place == "steps" else "MB all clients sent in the run")
        ax.set_ylabel("accuracy at the end, %")
        ax.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=list(SPLITS))
    parser.add_argument("--uploads", nargs="+", choices=UPLOADS, default=list(UPLOADS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1, 2, 4, 8], help="local steps a round")
    parser.add_argument("--steps", type=int, default=240, help="local steps in all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model", default="resnet8:width=16,stem=3x3")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    found: dict[tuple[str, str, int], tuple[list[float], float]] = {}
    for split, upload, length in product(args.splits, args.uploads, args.lengths):
        runs = [result_of(args, split, upload, length, seed) for seed in args.seeds]
        accuracies, sent = [accuracy for accuracy, _ in runs], fmean(sent for _, sent in runs)
        found[split, upload, length] = accuracies, sent
        spread = f" ± {stdev(accuracies):.1f}" if len(runs) > 1 else ""
        print(
            f"{split}: {upload}: {length} steps a round: {fmean(accuracies):.1f}{spread} %, {sent:.2f} MB", flush=True
        )
    if args.picture:
        draw(found, args.picture)


if __name__ == "__main__":
    main()
