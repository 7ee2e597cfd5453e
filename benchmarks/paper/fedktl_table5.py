"""FedKTL's Table 5: millions of numbers a round for CIFAR-100's sizes, and the bytes really sent for them.

    python benchmarks/paper/fedktl_table5.py

20 clients in the practical setting (Dirichlet 0.1 over 60,000 labels of 100 classes, a quarter of a client's samples
kept for testing), images of 32 x 32, features of 512, a generator of 512 latent numbers. The numbers are counted by the
ledger over a real second round of each method. What is sent does not depend on how many samples of a class a client
holds, so each trains on one or two of random pixels, and the models but FML's and FedKD's auxiliary are small.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.random import RandomState

import fewbytes as fb
from fewbytes.data import ClientData, FederatedData, Split
from fewbytes.data.partition import dirichlet
from fewbytes.experiments.settings import make_method
from fewbytes.generators import load_generator
from fewbytes.models.build import ModelBuilder
from fewbytes.reproduce import TABLES, read_table

CLIENTS, CLASSES, LATENT = 20, 100, 512


class Generator:
    """The compact generator behind as many latent numbers as StyleGAN-XL has; it sees the first of them."""

    latent_dim = LATENT

    def sample_latents(self, n: int) -> torch.Tensor:
        return torch.randn(n, LATENT)

    def synthesise(self, latents: torch.Tensor) -> torch.Tensor:
        small = load_generator("compact")
        return small.synthesise(latents[:, : small.latent_dim])


def make_data(seed: int) -> tuple[FederatedData, int]:
    """The clients, and S_c: how many pairs of a client and a class of its training samples there are."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), 600)
    clients, pairs = [], 0
    for part in dirichlet(labels, CLIENTS, 0.1, RandomState(seed), min_samples=1):
        train = labels[rng.permutation(part)[: max(1, len(part) * 3 // 4)]]
        held = np.unique(train)
        pairs += len(held)
        some = np.concatenate([held, held])
        x = rng.integers(0, 256, (len(some), 3, 32, 32)).astype(np.uint8)
        split = Split(x, torch.from_numpy(some))
        clients.append(ClientData(split, split.take([])))
    test = Split(np.zeros((1, 3, 32, 32), np.uint8), torch.zeros(1, dtype=torch.int64))
    return FederatedData(tuple(clients), test, tuple(map(str, range(CLASSES)))), pairs


def main() -> None:
    data, pairs = make_data(0)
    print(f"S_c = {pairs} pairs of a client and a class")
    print("| method | 10^6 numbers up | paper | down | paper | MB sent up | down | up, of 4 bytes | down |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    cells = read_table(TABLES["fedktl/table-5"], "paper").cells
    for i in range(0, len(cells), 2):
        name, (up, down) = cells[i].settings["method"], (cell.printed.mean for cell in cells[i : i + 2])
        own = {"generator": f"{__name__}:Generator", "server_epochs": 20} if name == "fedktl" else {}
        model = "cnn4@512" if name in ("fml", "fedkd") else "mlp@512"
        task = fb.Task.on(data, ModelBuilder(model, (3, 32, 32), CLASSES))
        ledger = fb.run(make_method(name, own), task, rounds=2, save_models=False).ledger.columns()
        second = ledger["round"] == 2
        c = {key: int(values[second].sum()) for key, values in ledger.items() if key.startswith(("bytes", "value"))}
        print(
            f"| {name} | {c['value_bytes_up'] / 4e6:.3f} | {up:.2f} | {c['value_bytes_down'] / 4e6:.3f} | {down:.2f} | "
            f"{c['bytes_up'] / 1e6:.3f} | {c['bytes_down'] / 1e6:.3f} | {c['bytes_up'] / c['value_bytes_up']:.2f} | "
            f"{c['bytes_down'] / c['value_bytes_down']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
