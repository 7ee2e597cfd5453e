"""FuseFL's Tables 2 and 3 at a reduced scale: accuracy of one-shot methods on the same clients.

    python benchmarks/paper/fusefl_table2.py --dataset cifar10 --alpha 0.1 0.5 --seeds 0 1 2 --out runs/table2

A run that is finished in --out is not run again. As in the paper, FuseFL's clients train networks of half the width of
the others', so that the fused network of five clients is about as large as one of theirs; all methods train for the
same number of local epochs. FedDF distils on noise, and as `feddf-public` on images that belong to no client.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

import fewbytes as fb
from fewbytes.data import federate, load_dataset
from fewbytes.errors import UserError
from fewbytes.models.build import ModelBuilder

PRINTED = {  # the paper's Tables 2 and 3, alpha 0.1 and 0.5
    "mnist": {"fedavg": (48.24, 90.55), "feddf": (60.15, 92.18), "dense": (66.61, 95.82), "ensemble": (86.81, 97.22),
              "fusefl-2": (97.02, 98.54), "fusefl-4": (97.19, 98.29)},
    "cifar10": {"fedavg": (23.93, 43.67), "feddf": (40.58, 53.56), "dense": (50.26, 62.19), "ensemble": (57.5, 79.91),
                "fusefl-2": (70.85, 84.34), "fusefl-4": (73.79, 81.15), "fusefl-4-mixed": (75.33, 82.71),
                "fusefl-4-average": (68.08, 80.35)},
}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.1, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--methods", nargs="+", default=["fedavg", "feddf", "dense", "ensemble", "fusefl-2", "fusefl-4"]
    )
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--samples", type=int, default=10_000, help="training images over all clients")
    parser.add_argument("--public", type=int, default=2_000, help="images of no client, for feddf-public")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--width", type=int, default=16, help="of FuseFL's networks; the others' are twice as wide")
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--set", nargs="*", default=[], metavar="METHOD.KEY=VALUE", help="other settings of a method")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def make_task(args: argparse.Namespace, name: str, alpha: float, seed: int) -> fb.Task:
    """Clients of a part of the training set, Dirichlet by class; the whole test set at the server."""
    dataset = load_dataset(args.dataset)
    order = np.random.default_rng(seed).permutation(len(dataset.train))
    mine = replace(dataset, train=dataset.train.take(order[: args.samples]))
    data = federate(mine, "dirichlet", args.clients, alpha=alpha, seed=seed)
    if name == "feddf-public":
        data = replace(data, public=dataset.train.take(order[len(order) - args.public :]))
    width = args.width if name.startswith("fusefl") else 2 * args.width
    depths = [10, 10, 26, 26, 18] if name.endswith("mixed") else [args.depth]  # the paper's mix of five
    names = "+".join(f"resnet{depth}:width={width},stem=3x3" for depth in depths)
    return fb.Task(ModelBuilder(names, dataset.train.shape, len(dataset.classes)), data, seed)


def make_method(args: argparse.Namespace, name: str) -> fb.Method:
    base, *variant = name.split("-")
    settings = {"epochs": args.epochs, "lr": args.lr, "batch": args.batch, "momentum": 0.9}
    if base == "fusefl":
        settings |= {"blocks": int(variant[0]), "adaptor": "average" if "average" in variant else "conv"}
    for text in args.set:
        key, _, value = text.partition("=")
        method, _, key = key.rpartition(".")
        if method == base:
            settings[key] = json.loads(value)
    return fb.METHODS[base](**settings)


def accuracy(args: argparse.Namespace, name: str, alpha: float, seed: int) -> dict[str, float]:
    """Run it, or read what an earlier run found."""
    folder = args.out / f"{args.dataset}-alpha{alpha}-seed{seed}-{name}"
    result = folder / "result.json"
    if not (result.exists() and json.loads(result.read_text())["status"] == "done"):
        resume = (folder / "checkpoint" / "run.state").exists()
        fb.run(
            make_method(args, name), make_task(args, name, alpha, seed), rounds=1, out=folder, resume=resume,
            workers=args.workers, save_models=False,
        )  # fmt: skip
    found = json.loads(result.read_text())
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    before = [row["accuracy"]["global"] for row in rows if row["phase"] == "round" and "global" in row["accuracy"]]
    return {
        "accuracy": 100 * found["accuracy"]["all"]["global"]["final"],
        "before": 100 * before[-1] if before else float("nan"),
        "up": found["uplink_bytes"] / args.clients / 1e6,
        "down": found["downlink_bytes"] / args.clients / 1e6,
        "seconds": found["seconds"],
    }


def main() -> None:
    args = parse()
    at = {0.1: 0, 0.5: 1}
    print(
        "| dataset | alpha | method | accuracy % | before calibration | paper % | MB up a client | MB down | seconds |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for alpha in args.alpha:
        for name in args.methods:
            try:
                found = [accuracy(args, name, alpha, seed) for seed in args.seeds]
            except UserError as error:
                print(f"{name}: {error}")
                continue
            values = [f["accuracy"] for f in found]
            spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
            printed = PRINTED.get(args.dataset, {}).get(name)
            paper = f"{printed[at[alpha]]:.1f}" if printed and alpha in at else ""
            means = {key: fmean(f[key] for f in found) for key in found[0]}
            before = f"{means['before']:.1f}" if name.startswith("fusefl") else ""
            print(
                f"| {args.dataset} | {alpha} | {name} | {fmean(values):.1f}{spread} | {before} | {paper} | "
                f"{means['up']:.2f} | {means['down']:.2f} | {means['seconds']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
