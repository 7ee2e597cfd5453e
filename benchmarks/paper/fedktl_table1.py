"""FedKTL's Table 1 at a reduced scale: methods with models of different architectures on the same clients.

    python benchmarks/paper/fedktl_table1.py --dataset cifar10 --rounds 20 --seeds 0 1 2 --out runs/fedktl

Practical setting: Dirichlet 0.1 class by class, at least one sample a client. All methods train with the paper's
settings (SGD 0.01, batches of 10 in stored order, one local epoch). A run that is finished in --out is not run again.

Accuracies are the best over rounds, as the paper reports: `own` is the clients' own models after local training, all
their test samples together (micro) and the mean over clients; `received` is what methods score that change a client's
model by what they send it, before it is trained (mean over clients).
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
from fewbytes.experiment import make_method
from fewbytes.models.build import ModelBuilder
from fewbytes.reproduce.fedktl import METHODS, TABLE_1

PRACTICAL = {METHODS[row]: theirs.split()[2] for row, theirs in TABLE_1.items()}  # on CIFAR-10
SHOWN = ["separate", *PRACTICAL]
LOCAL = {"epochs": 1, "lr": 0.01, "batch": 10}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--model", default="cnn4@64+resnet8:width=16@64")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--samples", type=int, default=10_000, help="training images over all clients")
    parser.add_argument("--test", type=int, default=5_000, help="test images over all clients")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--fraction", type=float, default=1.0, help="of the clients, a round")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", default=SHOWN, help="name, or name:key=value,key=value")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def make_task(args: argparse.Namespace, seed: int) -> fb.Task:
    """Clients of a part of the data set."""
    dataset = load_dataset(args.dataset)
    rng = np.random.default_rng(seed)
    train = dataset.train.take(rng.permutation(len(dataset.train))[: args.samples])
    test = dataset.test.take(rng.permutation(len(dataset.test))[: args.test])
    dataset = replace(dataset, train=train, test=test)
    options = {"min_samples": 1}
    data = federate(dataset, "dirichlet", args.clients, alpha=args.alpha, seed=seed, options=options)
    return fb.Task(ModelBuilder(args.model, dataset.train.shape, len(dataset.classes)), data, seed)


def cell(args: argparse.Namespace, spec: str, seed: int) -> dict[str, float]:
    """Run a method, or read what an earlier run found."""
    name, _, settings = spec.partition(":")
    fraction = f"-part{args.fraction}" if args.fraction != 1 else ""
    folder = args.out / f"{args.dataset}-{args.clients}{fraction}-seed{seed}-{spec.replace(':', '-').replace('/', '_')}"
    result = folder / "result.json"
    if not result.exists() or json.loads(result.read_text())["status"] != "done":
        task = make_task(args, seed)
        parameters = dict(LOCAL) if name != "separate" else LOCAL | {"momentum": 0.0}
        if name != "separate":
            parameters["fraction"] = args.fraction
        parameters |= dict(part.split("=", 1) for part in settings.split(",") if part)
        fb.run(
            make_method(name, parameters), task, rounds=args.rounds, out=folder, workers=args.workers,
            resume=(folder / "checkpoint" / "run.state").exists(), save_models=False,
        )  # fmt: skip
    found = json.loads(result.read_text())
    best = {kind: 100 * score["best"] for kind, score in found["accuracy"]["all"].items()}
    asked = found["rounds"] * args.clients
    return {
        "micro": best.get("micro", float("nan")),
        "mean": best.get("personalised", float("nan")),
        "received": best.get("combined", float("nan")),
        "up": found["uplink_bytes"] / asked / 1e3,
        "down": found["downlink_bytes"] / asked / 1e3,
        "up_nominal": found["uplink_nominal_bytes"] / asked / 1e3,
        "down_nominal": found["downlink_nominal_bytes"] / asked / 1e3,
        "seconds": found["seconds"],
    }


def main() -> None:
    args = parse()
    print(f"{args.dataset}, {args.clients} clients, {args.model}, {args.rounds} rounds, part {args.fraction}")
    print("| method | own, micro % | own, mean % | received % | paper % | kB up | kB down | nominal up | down | s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for spec in args.methods:
        runs = [cell(args, spec, seed) for seed in args.seeds]

        def shown(key: str, runs: list[dict[str, float]] = runs) -> str:
            values = [run[key] for run in runs]
            if values[0] != values[0]:
                return ""
            return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")

        mean = {key: fmean(run[key] for run in runs) for key in runs[0]}
        print(
            f"| {spec} | {shown('micro')} | {shown('mean')} | {shown('received')} | {PRACTICAL.get(spec, '')} | "
            f"{mean['up']:.2f} | {mean['down']:.2f} | {mean['up_nominal']:.2f} | {mean['down_nominal']:.2f} | "
            f"{mean['seconds']:.0f} |",
            flush=True,
        )  # kB a client and round, of all clients


if __name__ == "__main__":
    main()
