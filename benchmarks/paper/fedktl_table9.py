"""FedKTL's Table 9: one edge client with few images, alone and with the knowledge-transfer loop.

    python benchmarks/paper/fedktl_table9.py --dataset cifar10 --shots 23 9 2 --seeds 0 1 2 --rounds 100

The client holds so many training images of every class (the paper: of CIFAR-100's); it is scored on test images it
does not hold. Each round is one local epoch and one exchange. Both columns are FedKTL with its classifier; `alone` is
without pairs (`transfer=none`). Accuracies are the best of twenty evenly spaced
rounds.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np

import fewbytes as fb
from fewbytes.data import ClientData, FederatedData, load_dataset
from fewbytes.models.build import ModelBuilder

PRINTED = {23: (12.53, 13.02), 9: (7.55, 8.88), 2: (4.44, 8.76)}  # on CIFAR-100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--model", default="cnn4@512")
    parser.add_argument("--shots", type=int, nargs="+", default=[23, 9, 2])
    parser.add_argument("--test", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--generator", default="compact")
    parser.add_argument("--mu", type=float, default=50.0)
    args = parser.parse_args()
    dataset = load_dataset(args.dataset)
    print("| shots | alone % | with transfer % | paper, CIFAR-100: alone | with transfer |")
    print("| --- | --- | --- | --- | --- |")
    for shots in args.shots:
        found: dict[str, list[float]] = {"none": [], "pairs": []}
        for seed in args.seeds:
            rng = np.random.default_rng(seed)
            labels = dataset.train.labels.numpy()
            rows = [rng.choice(np.flatnonzero(labels == c), shots, replace=False) for c in range(len(dataset.classes))]
            train = dataset.train.take(rng.permutation(np.concatenate(rows)))
            test = dataset.test.take(rng.permutation(len(dataset.test))[: args.test])
            data = FederatedData((ClientData(train, test),), test, dataset.classes)
            task = fb.Task(ModelBuilder(args.model, train.shape, len(dataset.classes)), data, seed)
            for transfer, values in found.items():
                method = fb.FedKTL(generator=args.generator, mu=args.mu, lr=0.01)
                method = replace(method, transfer=transfer)
                every = max(1, args.rounds // 20)
                result = fb.run(method, task, rounds=args.rounds, workers=1, evaluate_every=every, save_models=False)
                values.append(100 * result.summary["accuracy"]["all"]["personalised"]["best"])
        cells = [f"{fmean(v):.2f}" + (f" ± {stdev(v):.2f}" if len(v) > 1 else "") for v in found.values()]
        paper = PRINTED.get(shots, ("", ""))
        print(f"| {shots} | {cells[0]} | {cells[1]} | {paper[0]} | {paper[1]} |", flush=True)


if __name__ == "__main__":
    main()
