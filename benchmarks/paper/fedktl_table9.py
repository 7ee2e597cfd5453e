"""FedKTL's Table 9: one edge client with few images, alone and with the knowledge-transfer loop.

    python benchmarks/paper/fedktl_table9.py --dataset cifar10 --shots 23 9 2 --seeds 0 1 2 --rounds 100

The client holds so many training images of every class (the paper: of CIFAR-100's); it is scored on test images it
does not hold. Each round is one local epoch and one exchange. All rows are FedKTL with its classifier: `none` without
pairs, `pairs` with the centroids as they are, `valid` with centroids as long as valid latents are on average.
Accuracies are the best of twenty evenly spaced rounds and the last, means over seeds with their standard errors; `gain`
is over `none`, seed by seed. `usable`: the part of rounds and classes with a pair.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np

import fewbytes as fb
from fewbytes.data import ClientData, FederatedData, load_dataset
from fewbytes.models.build import ModelBuilder

COLUMNS = {"none": {"transfer": "none"}, "pairs": {}, "valid": {"lengths": "valid"}}
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
    print("| shots | transfer | best % | gain | last % | gain | usable | paper, CIFAR-100 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for shots in args.shots:
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in COLUMNS}
        for seed in args.seeds:
            rng = np.random.default_rng(seed)
            labels = dataset.train.labels.numpy()
            rows = [rng.choice(np.flatnonzero(labels == c), shots, replace=False) for c in range(len(dataset.classes))]
            train = dataset.train.take(rng.permutation(np.concatenate(rows)))
            test = dataset.test.take(rng.permutation(len(dataset.test))[: args.test])
            data = FederatedData((ClientData(train, test),), test, dataset.classes)
            task = fb.Task.on(data, ModelBuilder(args.model, train.shape, len(dataset.classes)), seed=seed)
            for name, values in found.items():
                method = replace(fb.FedKTL(generator=args.generator, mu=args.mu, lr=0.01), **COLUMNS[name])
                every = max(1, args.rounds // 20)
                result = fb.run(method, task, rounds=args.rounds, workers=1, evaluate_every=every, save_models=False)
                score = result.summary["score"]["all"]["personalised"]
                sent = result.ledger.columns()["value_bytes_down"][1:] / (4 * len(dataset.classes))
                values.append(
                    (100 * score["best"], 100 * score["final"], sent.mean() / sent.max() if sent.any() else 0)
                )
        for name, values in found.items():
            best, last, usable = zip(*values, strict=True)
            alone = list(zip(*found["none"], strict=True))
            cells = [told(best), gain(best, alone[0]), told(last), gain(last, alone[1]), f"{fmean(usable):.2f}"]
            paper = PRINTED.get(shots, ("", ""))[name != "none"]
            print(f"| {shots} | {name} | {' | '.join(cells)} | {paper} |", flush=True)


def told(values: Sequence[float]) -> str:
    """The mean and its standard error."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{error}"


def gain(values: Sequence[float], alone: Sequence[float]) -> str:
    """The mean of the differences, and its standard error."""
    return told([value - other for value, other in zip(values, alone, strict=True)])


if __name__ == "__main__":
    main()
