"""GENE-FL's Tables I to IV and Fig. 3 at a reduced scale: known clients, then newcomers of unseen classes.

    python benchmarks/paper/genefl_tables.py --split shards --out runs/genefl
    python benchmarks/paper/genefl_tables.py --split dirichlet --alpha 0.1 --out runs/genefl

CIFAR-10: half of the classes is the known clients', half the newcomers'. Clients are tested on images of all classes
that they hold, 200 drawn of them (`--test own-share`: of their share of the test set). All methods run inside the same
clusters, with SGD 0.01, momentum 0.9 and batches of 64. A run that is finished in --out is not run again.

`known` is the mean over the last rounds before the newcomers come of the cohort's own models after local training
(`received`: of what the server sent them, before it). `+0` is the newcomers' after their first local training, `+r`
after r rounds more; `at once` what they inherit of GENE-FL, before any training. `up` is the uplink of the training
rounds, with the known clients and in all, in MB = 10^6 bytes as sent; `of FedAvg` the part of clustered FedAvg's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean

import fewbytes as fb
from fewbytes.data import ClientData, FederatedData, Partition, federate, load_dataset
from fewbytes.experiments.run_folders import begun
from fewbytes.experiments.settings import make_method
from fewbytes.models.build import ModelBuilder

METHODS = [
    "fedavg:received=true", "fedbn", "partialfed", "fedfina", "fedlp", "fedlps", "learngene", "genefl",
    "genefl:inherit=cluster", "genefl:inherit=nothing",
]  # fmt: skip
LAST = 5  # rounds that `known` is a mean of
AFTER = (0, 1, 5, 10)  # rounds after which newcomers are shown


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", choices=["shards", "dirichlet"], default="shards")
    parser.add_argument("--shards", type=int, default=4, help="s, of each client")
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--test", choices=["held-classes", "own-share"], default="held-classes")
    parser.add_argument("--model", default="resnet18:width=8")
    parser.add_argument("--clients", type=int, default=20, help="known ones")
    parser.add_argument("--newcomers", type=int, help="default: as many")
    parser.add_argument("--samples", type=int, default=256, help="training images of a known client, at most")
    parser.add_argument("--new-samples", type=int, help="of a newcomer (default: as many)")
    parser.add_argument("--fraction", type=float, default=0.25, help="of the clients, a round")
    parser.add_argument("--rounds", type=int, default=30, help="before the newcomers come")
    parser.add_argument("--more", type=int, default=11, help="rounds with the newcomers")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--clusters", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=METHODS, help="name, or name:key=value,key=value")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.newcomers, args.new_samples = args.newcomers or args.clients, args.new_samples or args.samples
    return args


def make_task(args: argparse.Namespace) -> fb.Task:
    """Known clients and newcomers, cut down to a part of their samples."""
    dataset = load_dataset("cifar10")
    partition = Partition(
        args.split, args.clients, alpha=args.alpha, shards_per_client=args.shards, test=args.test,
        newcomers=args.newcomers, arrival=args.rounds + 1,
    )  # fmt: skip
    data = federate(dataset, partition, args.seed)
    most = [args.samples] * args.clients + [args.new_samples] * args.newcomers
    clients = tuple(
        ClientData(c.train.take(range(min(n, len(c.train)))), c.test.take(range(min(200, len(c.test)))))
        for c, n in zip(data.clients, most, strict=True)
    )
    data = FederatedData(clients, data.test, data.classes, presence=data.presence)
    return fb.Task.on(data, ModelBuilder(args.model, dataset.train.shape, len(dataset.classes)), seed=args.seed)


def rows_of(args: argparse.Namespace, spec: str) -> list[dict]:
    """Run a method, or read what an earlier run found: the lines of rounds.jsonl."""
    name, _, settings = spec.partition(":")
    kind = f"{args.split}{args.shards if args.split == 'shards' else args.alpha:g}"
    place = f"{kind}-{args.test}-{args.model.replace(':', '_')}-seed{args.seed}-{spec.replace(':', '-')}"
    folder = args.out / place
    result = folder / "result.json"
    if not result.exists() or json.loads(result.read_text())["status"] != "done":
        parameters = {"fraction": args.fraction, "epochs": args.epochs, "lr": 0.01, "batch": 64, "momentum": 0.9}
        parameters |= dict(part.split("=", 1) for part in settings.split(",") if part)
        own = {"clusters": args.clusters} if name == "genefl" else {}
        method = make_method(name, parameters | own)
        fb.run(
            method if own else fb.Clustered(method, args.clusters), make_task(args), rounds=args.rounds + args.more,
            out=folder, workers=args.workers, resume=begun(folder), save_models=False,
        )  # fmt: skip
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def main() -> None:
    args = parse()
    print(f"{'':24} {'known':>6} {'received':>8} {'at once':>8} " + " ".join(f"{f'+{r}':>6}" for r in AFTER), end=" ")
    print(f"{'up known':>9} {'up all':>7} {'of FedAvg':>9} {'down all':>8}")
    fedavg = 0
    for spec in args.methods:
        rows = rows_of(args, spec)
        rounds = {row["round"]: row for row in rows if row["phase"] == "round"}
        last = [rounds[t]["scores"]["accuracy"] for t in range(args.rounds - LAST + 1, args.rounds + 1)]
        own = "cohort" if "cohort" in last[0] else "personalised"
        joined = [row["scores"]["accuracy"]["inherited"] for row in rows if row["phase"] == "join" and row["scores"]]
        new = [
            100 * rounds[args.rounds + 1 + r]["scores"]["accuracy"][own] for r in AFTER if args.rounds + 1 + r in rounds
        ]
        up = {t: row["uplink_bytes"] for t, row in rounds.items()}
        total, known = sum(up.values()), sum(size for t, size in up.items() if t <= args.rounds)
        fedavg = total if spec.startswith("fedavg") else fedavg
        received = f"{100 * fmean(a['combined'] for a in last):8.1f}" if "combined" in last[0] else f"{'-':>8}"
        inherited = f"{100 * fmean(joined):8.1f}" if joined else f"{'-':>8}"
        print(f"{spec:24} {100 * fmean(a[own] for a in last):6.1f} {received} {inherited}", end=" ")
        print(" ".join(f"{value:6.1f}" for value in new), end=" ")
        print(f"{known / 1e6:9.2f} {total / 1e6:7.2f} {total / fedavg if fedavg else 0:9.3f}", end=" ")
        print(f"{sum(row['downlink_bytes'] for row in rounds.values()) / 1e6:8.2f}", flush=True)


if __name__ == "__main__":
    main()
