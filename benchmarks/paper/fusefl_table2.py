"""FuseFL's Tables 2 and 3 at a reduced scale: accuracy of one-shot methods on the same clients.

    python benchmarks/paper/fusefl_table2.py --dataset cifar10 --alpha 0.1 0.5 --seeds 0 1 2 --out runs/table2

A run that is finished in --out is not run again. As in the paper, FuseFL's clients train networks of half the width of
the others', so that the fused network of five clients is about as large as one of theirs; all methods train for the
same number of local epochs. FedDF distils on images that belong to no client. One-shot FedAvg, FedDF and DENSE start
from the clients' models that the ensemble's run trained: their own training would be the same, bit for bit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from torch import nn

import fewbytes as fb
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.experiments.run_folders import begun
from fewbytes.methods.parts.one_shot import Uploads
from fewbytes.models.build import ModelBuilder
from fewbytes.reproduce import TABLES, read_table
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.wire import unpack

ROWS = {
    "fedavg": "FedAvg", "feddf": "FedDF", "dense": "DENSE", "ensemble": "Ensemble", "fusefl-2": "FuseFL K=2",
    "fusefl-4": "FuseFL K=4", "fusefl-8": "FuseFL K=8", "fusefl-4-mixed": "FuseFL K=4 mixed",
    "fusefl-4-average": "FuseFL K=4 average",
}  # fmt: skip
PRINTED = {
    (c.row, c.settings["dataset"], c.settings["alpha"]): c.printed.mean
    for number in (2, 3)
    for c in read_table(TABLES[f"fusefl/table-{number}"], "paper").cells
    if c.printed
}


def paper(dataset: str, name: str, alpha: float) -> float | None:
    """What Tables 2 and 3 print."""
    return PRINTED.get((ROWS[name], dataset, alpha)) if name in ROWS else None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--alpha", type=float, nargs="+", default=[0.1, 0.5])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--methods", nargs="+", default=["fedavg", "feddf", "dense", "ensemble", "fusefl-2", "fusefl-4"]
    )
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--samples", type=int, default=5_000, help="training images over all clients")
    parser.add_argument("--test", type=int, default=2_000, help="test images at the server")
    parser.add_argument("--public", type=int, default=2_000, help="images of no client, for FedDF")
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--width", type=int, default=16, help="of FuseFL's networks; the others' are twice as wide")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--set", nargs="*", default=[], metavar="METHOD.KEY=VALUE", help="other settings of a method")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def make_task(args: argparse.Namespace, name: str, alpha: float, seed: int) -> fb.Task:
    """Clients of a part of the training set, Dirichlet by class; a part of the test set at the server."""
    dataset = load_dataset(args.dataset)
    dataset = replace(
        dataset, test=dataset.test.take(np.random.default_rng(0).permutation(len(dataset.test))[: args.test])
    )
    order = np.random.default_rng(seed).permutation(len(dataset.train))
    mine = replace(dataset, train=dataset.train.take(order[: args.samples]))
    data = federate(mine, Partition("dirichlet", args.clients, alpha=alpha), seed=seed)
    if name == "feddf":
        data = replace(data, public=dataset.train.take(order[len(order) - args.public :]))
    width = args.width if name.startswith("fusefl") else 2 * args.width
    depths = [10, 10, 26, 26, 18] if name.endswith("mixed") else [args.depth]  # the paper's mix of five
    names = "+".join(f"resnet{depth}:width={width},stem=3x3" for depth in depths)
    return fb.Task.on(data, ModelBuilder(names, dataset.train.shape, len(dataset.classes)), seed=seed)


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


@dataclass(frozen=True)
class OneShotFedAvg(fb.Ensemble):
    """The unweighted mean of the clients' models, as FuseFL compares it."""

    def global_model(self, state: Uploads, problem: fb.Problem) -> nn.Module:
        mean = fb.Mean()
        for theta in state.models.values():
            mean.add(theta)
        return problem.first_model(mean())


def trained(folder: Path) -> Callable[[fb.Method, Uploads, fb.Network, int], None]:
    """A round that takes the clients' models from an ensemble's run."""
    models = unpack(Uploads, read_checkpoint(folder).server, limit=1 << 40).models

    def round(self: fb.Method, state: Uploads, net: fb.Network, t: int) -> None:
        state.models = dict(models)
        if isinstance(self, fb.FedDF):
            mean = fb.Mean()
            for theta in models.values():
                mean.add(theta)
            state.student = mean()

    return round


def accuracy(args: argparse.Namespace, name: str, alpha: float, seed: int) -> dict[str, float]:
    """Run it, or read what an earlier run found."""
    folder = args.out / f"{args.dataset}-alpha{alpha}-seed{seed}-{name}"
    if not (folder / "result.json").exists() or found(folder)["status"] != "done":
        task = make_task(args, name, alpha, seed)
        if name.startswith("fusefl") or name == "ensemble":
            method = make_method(args, name)
        else:
            accuracy(args, "ensemble", alpha, seed)
            base = OneShotFedAvg if name == "fedavg" else fb.METHODS[name]
            cls = type(name, (base,), {"round": trained(args.out / f"{args.dataset}-alpha{alpha}-seed{seed}-ensemble")})
            method = cls(**({} if name == "fedavg" else make_method(args, name).parameters))
        fb.run(
            method, task, rounds=1, out=folder, resume=begun(folder),
            workers=args.workers, save_models=False,
        )  # fmt: skip
    result = found(folder)
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    scores = [row["scores"].get("accuracy", {}) for row in rows if row["phase"] == "round"]
    before = [each["global"] for each in scores if "global" in each]
    return {
        "accuracy": 100 * result["score"]["all"]["global"]["final"],
        "before": 100 * before[-1] if before else float("nan"),
        "up": result["uplink_bytes"] / args.clients / 1e6,
        "down": result["downlink_bytes"] / args.clients / 1e6,
        "seconds": result["seconds"],
    }


def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def main() -> None:
    args = parse()
    print(
        "| dataset | alpha | method | accuracy % | before calibration | paper % | MB up a client | MB down | seconds |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for alpha in args.alpha:
        for name in args.methods:
            runs = [accuracy(args, name, alpha, seed) for seed in args.seeds]
            values = [run["accuracy"] for run in runs]
            spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
            theirs = paper(args.dataset, name, alpha)
            means = {key: fmean(run[key] for run in runs) for key in runs[0]}
            before = f"{means['before']:.1f}" if name.startswith("fusefl") else ""
            print(
                f"| {args.dataset} | {alpha} | {name} | {fmean(values):.1f}{spread} | {before} | {theirs or ''} | "
                f"{means['up']:.2f} | {means['down']:.2f} | {means['seconds']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
