"""Fed-KGF's Fig. 3 and Table 1 at a reduced scale: accuracy and bytes of compressed methods on CIFAR-10, ten clients.

    python benchmarks/paper/fedkgf_table1.py --out runs/fedkgf [--partitions iid main-category] [--rows fedavg fedkgf]

One local epoch a round, crops and flips, the learning rate by a cosine to 0 over the rounds, every client each round.
MB are 10^6 bytes that were sent, lossless coding included, of all clients in a round; "of FedAvg" is the uplink's part.
A run that is finished in --out is not run again. FedPURIN's accuracy is the mean of the clients' own models on their
own classes, the others' is the global model's on the server's test set.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import fewbytes as fb
from fewbytes.data import Partition, crop_flip, federate, load_dataset, with_transforms
from fewbytes.experiments.run_folders import begun
from fewbytes.models.build import ModelBuilder
from fewbytes.models.kgf import Kernels
from fewbytes.reproduce import TABLES, read_table

PRINTED = {
    cell.row.lower().replace("fed-kgf", "fedkgf").replace(" (", ", ").rstrip(")"): cell.printed.mean
    for cell in read_table(TABLES["fedkgf/table-1"], "small").cells
    if cell.printed
}
"""The paper's Table 1, MB."""
SERVER_LR = 0.3  # of FedCAMS
KGF = {"fedavg, --kgf 16", "fedpurin, --kgf 16"}


def methods(rounds: int, lr: float, batch: int) -> dict[str, fb.Method]:
    """Each row's method, with settings found by short runs."""
    every: dict[str, Any] = {"epochs": 1, "batch": batch}
    sgd = every | {"lr": lr, "momentum": 0.9, "weight_decay": 5e-4, "lr_rounds": rounds}
    return {
        "fedavg": fb.FedAvg(**sgd),
        "fedkgf": fb.FedKGF(**sgd),
        "fedkgf, all upload": fb.FedKGF(**sgd, owners=0),
        "fedkgf, common": fb.FedKGF(**sgd, common=True),
        "dgc": fb.DGC(**sgd),
        "fedcom": fb.FedCOM(**sgd),
        "fedcams": fb.FedCAMS(**sgd, server_lr=SERVER_LR),
        "smartidx": fb.SmartIdx(**sgd),
        "fedpm": fb.FedPM(**every, lr_rounds=rounds),
        "fedpurin": fb.FedPURIN(**every, lr=lr),
        "fedpurin, --kgf 16": fb.FedPURIN(**every, lr=lr),
    }


def make_task(args: argparse.Namespace, partition: str, row: str) -> fb.Task:
    """Ten clients with `args.samples` training images each; the whole test set at the server."""
    dataset = load_dataset("cifar10")
    data = federate(dataset, Partition(partition, args.clients, samples=(args.samples, 100)), seed=args.seed)
    kernels = Kernels(16, args.seed) if row in KGF else None
    build = ModelBuilder(args.model, dataset.train.shape, len(dataset.classes), kernels)
    return fb.Task.on(with_transforms(data, crop_flip), build, seed=args.seed)


def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--partitions", nargs="+", default=["iid", "main-category"])
    parser.add_argument("--rows", nargs="+")
    parser.add_argument("--model", default="resnet10:width=32,stem=7x7")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--samples", type=int, default=1_000, help="training images of a client")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    chosen = methods(args.rounds, args.lr, args.batch)
    for partition in args.partitions:
        base = 0.0
        for row in args.rows or chosen:
            folder = args.out / f"{partition}-{row.replace(', ', '-').replace(' ', '')}-{args.seed}"
            if not (folder / "result.json").exists() or found(folder)["status"] != "done":
                fb.run(
                    chosen[row], make_task(args, partition, row), rounds=args.rounds, out=folder, workers=args.workers,
                    evaluate_every=5, save_models=False, resume=begun(folder),
                )  # fmt: skip
            result = found(folder)
            up, down = (result[f"{way}_bytes"] / result["rounds"] / 1e6 for way in ("uplink", "downlink"))
            base = up if row == "fedavg" else base
            rows = [
                json.loads(line)["scores"].get("accuracy", {})
                for line in (folder / "rounds.jsonl").read_text().splitlines()
            ]
            kind = result["score"]["kind"]
            curve = " ".join(f"{100 * accuracy[kind]:.1f}" for accuracy in rows if kind in accuracy)
            of = f"{up / base:.4f} of FedAvg" if base else ""
            print(f"{partition}: {row}: {kind} {curve}; {up:.3f} MB up {of}, {down:.3f} down, "
                  f"{result['seconds']:.0f} s; paper {PRINTED.get(row, '')}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
