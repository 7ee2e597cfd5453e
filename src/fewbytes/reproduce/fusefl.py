"""FuseFL's Tables 2, 4, 5 and 13: one-shot accuracy, and the sizes of what is stored and sent.

At the paper's scale five to fifty clients share the whole data set and train ResNet-18 for 200 local epochs; FuseFL's
clients train narrower networks, so that the fused one is about as large. At the small scale a twenty-fifth of the
images and an eighth of the width, 4 local epochs (FuseFL with eight blocks 8), and servers that distil for seconds; the
tables of sizes keep the paper's networks and train each client on 16 images, with at most 20 clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from safetensors import safe_open

from fewbytes.report.folder import Direction, RunFolder
from fewbytes.reproduce.grid import Cell, Figure, Printed, Scale, Table, final, printed

DATASETS = {
    "MNIST": "mnist", "Fashion-MNIST": "fashion_mnist", "CIFAR-10": "cifar10",
    "SVHN": "ufldl-stanford/svhn/cropped_digits", "CIFAR-100": "cifar100",
}  # fmt: skip
PUBLIC = {
    "mnist": "fashion_mnist", "fashion_mnist": "mnist", "cifar10": "cifar100", "cifar100": "cifar10",
    "ufldl-stanford/svhn/cropped_digits": "cifar100",
}  # fmt: skip
"""What FedDF distils on at the paper's scale."""
ALPHAS = (0.1, 0.3, 0.5)
WIDTHS = {5: 32, 10: 20, 20: 14, 50: 9}
"""By the number of clients: of FuseFL's networks, about 64 over its square root."""
TRAINED = {"FedAvg": "fedavg", "FedDF": "feddf", "Fed-DAFL": "feddafl", "Fed-ADI": "fedadi", "DENSE": "dense",
           "Ensemble": "ensemble"}  # fmt: skip
QUICK: dict[str, dict[str, Any]] = {  # servers at the small scale
    "feddf": {"server_steps": 100, "server_batch": 64},
    "feddafl": {"server_steps": 60, "server_batch": 64},
    "fedadi": {"server_epochs": 4, "pixel_steps": 30, "server_steps": 20, "server_batch": 64},
    "dense": {"server_epochs": 6, "generator_steps": 5, "server_batch": 64},
}

TABLE_2 = {  # a data set's three alphas, the data sets in order; Tiny-ImageNet is left out
    "FedAvg": "48.24 72.94 90.55 41.69 82.96 83.72 23.93 27.72 43.67 31.65 61.51 56.09 4.58 11.61 12.11",
    "FedDF": "60.15 74.01 92.18 43.58 80.67 84.67 40.58 46.78 53.56 49.13 73.34 73.98 28.17 30.28 36.35",
    "Fed-DAFL": "64.38 74.18 93.01 47.14 80.59 84.02 47.34 53.89 58.59 53.23 76.56 78.03 28.89 34.89 38.19",
    "Fed-ADI": "64.13 75.03 93.49 48.49 81.15 84.19 48.59 54.68 59.34 53.45 77.45 78.85 30.13 35.18 40.28",
    "DENSE": "66.61 76.48 95.82 50.29 83.96 85.94 50.26 59.76 62.19 55.34 79.59 80.03 32.03 37.32 42.07",
    "Ensemble": "86.81 96.76 97.22 67.71 87.25 89.42 57.5 77.35 79.91 65.29 88.31 85.7 35.69 49.41 53.39",
    "FuseFL K=2": "97.02 98.43 98.54 83.15 89.94 89.47 70.85 81.41 84.34 76.88 91.07 90.87 34.07 45.12 46.12",
    "FuseFL K=4": "97.19 98.34 98.29 83.05 84.58 90.50 73.79 84.58 81.15 78.08 89.63 89.34 36.86 42.79 49.30",
    "FuseFL K=8": "96.66 98.35 98.16 83.2 88.57 88.24 70.46 80.70 74.99 80.31 88.88 89.94 34.97 39.08 40.73",
}
TABLE_4 = {  # MB by number of clients
    "single": "42.66 42.66 42.66 42.66", "Ensemble": "213.31 426.62 853.24 2133.10",
    "FuseFL K=2": "53.71 42.32 42.13 45.48", "FuseFL K=4": "55.38 44.92 47.22 58.63",
    "FuseFL K=8": "68.08 64.77 86.11 159.08", "FuseFL K=4 average": "53.32 41.66 40.83 42.18",
}  # fmt: skip
TABLE_5 = {  # alpha 0.5, by number of clients: CIFAR-10, then SVHN
    "FedAvg": "43.67 38.29 36.03 23.01 56.09 45.34 47.79 36.53",
    "FedDF": "53.56 54.44 43.15 29.52 73.98 62.12 60.45 51.44",
    "Fed-DAFL": "55.46 56.34 45.98 29.41 78.03 63.34 62.19 54.23",
    "Fed-ADI": "58.59 57.13 46.45 27.45 78.85 65.45 63.98 57.35",
    "DENSE": "62.19 61.42 52.71 28.51 80.03 67.57 66.42 59.27",
    "Ensemble": "79.91 77.25 59.69 55.63 85.7 73.45 68.76 54.96",
    "FuseFL K=2": "84.34 73.71 62.85 42.18 90.87 88.52 85.18 72.25",
    "FuseFL K=4": "81.15 78.28 62.57 37.08 89.34 89.31 86.94 45.49",
    "FuseFL K=8": "74.99 67.35 63.19 28.28 89.94 72.65 64.11 42.19",
}


def numbers(scale: Scale) -> Sequence[int]:
    """Of clients, that a table has."""
    return [clients for clients in WIDTHS if scale == "paper" or clients <= 20]


def method_of(row: str) -> tuple[str, dict[str, Any]]:
    """The method of a row and its own parameters."""
    if row in TRAINED:
        return TRAINED[row], {}
    blocks, _, average = row.removeprefix("FuseFL K=").partition(" ")
    return "fusefl", {"blocks": int(blocks)} | ({"adaptor": "average"} if average else {})


def settings(scale: Scale, dataset: str, alpha: float, clients: int, row: str) -> dict[str, Any]:
    """An experiment's settings, but for the seed."""
    small = scale == "small"
    name, own = method_of(row)
    width = WIDTHS[clients] if name == "fusefl" else 64
    if small:
        width = max(2, width // 8)
        own |= QUICK.get(name, {}) | ({"ccvr_samples": 500} if name == "fusefl" else {})
        local = {"epochs": max(4, own.get("blocks", 1)), "lr": 0.05, "batch": 32, "momentum": 0.9}
    else:
        low = dataset in ("mnist", "fashion_mnist", "ufldl-stanford/svhn/cropped_digits") and alpha == 0.1
        local = {"epochs": 200, "lr": 0.001 if low or dataset == "mnist" else 0.01, "batch": 128, "momentum": 0.9}
    return {
        "method": name, "dataset": dataset, "partition": "dirichlet", "alpha": alpha, "clients": clients, "rounds": 1,
        "model": f"resnet18:width={width}", "augment": "crop-flip" if dataset.startswith("cifar") else "none",
        "parameters": {**local, **own}, **({"part": 0.04} if small else {}),
        **({"public": 500 if small else PUBLIC[dataset]} if name == "feddf" else {}),
    }  # fmt: skip


NOTES = (
    "FedAvg is one round of all local epochs, its clients weighted by their samples. FedDF distils on another data "
    "set, at the small scale on held-out images of the same.",
    "Tiny-ImageNet is not in the grid.",
)
SMALL_NOTES = (
    "FuseFL K=8 has eight local epochs, one a stage, the others four.",
    "A client takes some fifty steps, and the running statistics of its batch normalisation lag behind its weights: on "
    "MNIST this holds the ensemble far below what the same weights reach with statistics of the training images.",
)
UNIT = "accuracy of the server's model on the test set, %"


def one_shot(title: str, cells: Sequence[Cell], scale: Scale) -> Table:
    """A table of the server's accuracy."""
    small = scale == "small"
    return Table(title, UNIT, cells, NOTES + SMALL_NOTES * small, (1,) if small else (1, 2, 3))


def table_2(scale: Scale) -> Table:
    """Five clients, one shot."""
    at = [(title, name, alpha) for title, name in DATASETS.items() for alpha in ALPHAS]
    cells = [
        Cell(row, f"{title} {alpha}", settings(scale, name, alpha, 5, row), final("global"), mean)
        for row, theirs in TABLE_2.items()
        for (title, name, alpha), mean in zip(at, printed(theirs), strict=True)
    ]
    return one_shot("FuseFL, Table 2: one shot", cells, scale)


def table_5(scale: Scale) -> Table:
    """More and more clients, one shot."""
    at = [(title, clients) for title in ("CIFAR-10", "SVHN") for clients in WIDTHS]
    cells = [
        Cell(row, f"{title} M={clients}", settings(scale, DATASETS[title], 0.5, clients, row), final("global"), mean)
        for row, theirs in TABLE_5.items()
        for (title, clients), mean in zip(at, printed(theirs), strict=True)
        if clients in numbers(scale)
    ]
    return one_shot("FuseFL, Table 5: number of clients", cells, scale)


def sized(scale: Scale, clients: int, row: str) -> dict[str, Any]:
    """Settings of a run whose sizes alone matter: the paper's networks, 16 images a client, one epoch a stage."""
    own = settings("paper", "cifar10", 0.5, clients, row)
    blocks = own["parameters"].get("blocks", 1)
    own["parameters"] |= {"epochs": blocks, "batch": 16} | ({"ccvr_samples": 50} if "FuseFL" in row else {})
    return own | {"partition": "iid", "part": 0.02, "samples": "16/4", "save_models": True}


def stored(buffers: bool) -> Figure:
    """The size of the run's global model in MB of 2^20 bytes, four bytes a number; with its buffers or without."""

    def figure(run: RunFolder) -> float | None:
        path = run.path / "models" / "global.safetensors"
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            sizes: dict[str, int] = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        kept = ("running_mean", "running_var", "num_batches_tracked")
        return sum(n for name, n in sizes.items() if buffers or not name.endswith(kept)) * 4 / 2**20

    return figure


def moved(direction: Direction, sent: bool = False) -> Figure:
    """What all clients moved over the whole run, in MB of 2^20 bytes by the papers' count, or of 10^6 as sent."""

    def figure(run: RunFolder) -> float | None:
        total = run.total_bytes(direction) if sent else run.nominal_bytes(direction)
        return None if total is None else total / (1e6 if sent else 2**20)

    return figure


def table_4(scale: Scale) -> Table:
    """What the final model takes."""
    cells = []
    for row, theirs in TABLE_4.items():
        for clients, mean in zip(WIDTHS, printed(theirs), strict=True):
            if clients in numbers(scale):
                own = sized(scale, clients, "FedAvg" if row == "single" else row)
                cells.append(Cell(row, f"M={clients}", own, stored("FuseFL" not in row), mean))
    return Table(
        "FuseFL, Table 4: memory", "MB of 2^20 bytes, four bytes a number", cells,
        ("As the paper counts: single models and ensembles with their batch normalisation's statistics, fused networks "
         "without.",),
        (1,),
    )  # fmt: skip


def table_13(scale: Scale) -> Table:
    """What all clients move."""
    cells = []
    for row in (*(row for row in TABLE_4 if row != "single"), "FedAvg (10 rounds)"):
        fused = "FuseFL" in row
        for clients, memory in zip(WIDTHS, printed(TABLE_4[row if fused else "Ensemble"]), strict=True):
            if clients not in numbers(scale) or memory is None:
                continue
            times = clients if fused else 1 if row == "Ensemble" else 10
            own = sized(scale, clients, row.partition(" (")[0])
            own |= {"rounds": 10, "evaluate_every": 10} if "FedAvg" in row else {}
            way: Direction = "downlink" if fused else "uplink"
            cells += [
                Cell(row, f"M={clients}", own, moved(way), Printed(times * memory.mean)),
                Cell(row, f"M={clients} up as sent", own, moved("uplink", sent=True)),
                Cell(row, f"M={clients} down as sent", own, moved("downlink", sent=True)),
            ]
    return Table(
        "FuseFL, Table 13: communication", "MB of 2^20 bytes that all clients move; as sent: in 10^6 bytes", cells,
        ("The paper counts M models uploaded for one-shot methods, and for FuseFL M times the whole fused network, as "
         "if each client downloaded all of it. Ours counts what comes down: a client has its own branch already, "
         "and batch normalisation's statistics travel, too.",),
        (1,),
    )  # fmt: skip
