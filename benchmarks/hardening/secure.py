"""What secure aggregation costs beside a plain round, and whether its sum is that of plain numbers."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch
from figures import Figure
from scipy.stats import chi2

import fewbytes as fb
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.methods.parts.masks import agreed, dequantised, masked, new_key, private_key, public_key, quantised
from fewbytes.models import build_model

ROUNDS = 20
TERMS: dict[str, Any] = {"epochs": 2, "lr": 0.2, "batch": 20}


def rounds(repeats: int) -> list[Figure]:
    """FedAvg on digits, 10 and 50 clients, twenty rounds in one process, so many runs of either kind in turn; the
    median of all rounds."""
    found = []
    data = load_dataset("digits")
    kinds = {"plain": fb.FedAvg(**TERMS), "with secure aggregation": fb.SecureAggregation(fb.FedAvg(**TERMS))}
    for clients in (10, 50):
        dealt = federate(data, Partition("iid", clients=clients), seed=0)
        task = fb.Task.on(dealt, lambda: build_model("mlp", data.train.shape, len(data.classes)), seed=0)
        taken: dict[str, list[float]] = {name: [] for name in kinds}
        results: dict[str, fb.Result] = {}
        for _ in range(repeats):
            for name, method in kinds.items():
                results[name] = fb.run(method, task, rounds=ROUNDS, evaluate_every=ROUNDS, workers=1, save_models=False)
                taken[name] += [row["seconds"] - row["seconds_scoring"] for row in results[name].rounds]
        beside = statistics.median(taken["plain"])
        for name, result in results.items():
            seconds = statistics.median(taken[name])
            up, down = (result.summary[f"{way}_bytes_per_client_round"] for way in ("uplink", "downlink"))
            figure = (
                f"{result.accuracy:.1%}, {seconds:.2f} s a round ({seconds / beside:.1f} times), "
                f"{up:,.0f} B up, {down:,.0f} B down a client"
            )
            found.append(Figure(f"fedavg, {clients} clients, {name}", figure, "", None))
        apart = abs(results["plain"].accuracy - results["with secure aggregation"].accuracy)
        found.append(Figure("their accuracies", f"{100 * apart:.1f} points apart", "1 point", apart <= 0.01))
    return found


def summed(count: int) -> list[Figure]:
    """So many sums of ten clients' million values, by the masks of all pairs: equal, bit for bit, to those without; and
    how unlike chance the bytes of one client are."""
    equal, lowest, off = 0, 1.0, 0.0
    for seed in range(count):
        values = torch.randn(10, 1_000_000, generator=torch.Generator().manual_seed(seed)).clamp(-64, 64)
        words = [quantised(each, 64.0, 0.1) for each in values]
        raw = [new_key() for _ in words]
        sent = []
        for i, mine in enumerate(map(private_key, raw)):
            others = {j: agreed(mine, public_key(raw[j]), "masks") for j in range(10) if j != i}
            taken = [mask for j, mask in others.items() if j < i]
            sent.append(masked(words[i], [mask for j, mask in others.items() if j > i], taken))
        total = np.sum(sent, axis=0, dtype=np.uint32)
        equal += np.array_equal(total, np.sum(words, axis=0, dtype=np.uint32))
        off = max(off, float((dequantised(total, 64.0, 1.0) - values.double().mean(0)).abs().max()))
        counts = np.bincount(sent[0].view(np.uint8), minlength=256)
        expected = counts.sum() / 256
        lowest = min(lowest, float(chi2.sf(((counts - expected) ** 2).sum() / expected, 255)))
    return [
        Figure(f"{count} masked sums equal, bit for bit, to the plain quantised sum", f"{equal} of {count}", "all",
               equal == count),
        Figure(
            "largest difference from the mean of the values",
            f"{off:.1e}",
            "10 halves of 64 / 2^30",
            off <= 5 * 64 / 2**30,
        ),
        Figure("bytes of a client, of 256 kinds: the lowest chi-square's p", f"{lowest:.3f}", "above 1e-6",
               lowest > 1e-6),
    ]  # fmt: skip
