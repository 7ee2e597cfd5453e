"""GENE-FL's Tables I to IV: known clients, then newcomers with classes the known ones do not hold.

At the paper's scale 50 known clients and 50 newcomers, ten a round, train ResNet-18 for 100 rounds and 50 more. At the
small scale six and six, three a round, train an eighth of its width for ten rounds and six more.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Any

from fewbytes.report.folder import RunFolder
from fewbytes.reproduce.grid import Cell, Figure, Scale, Table, printed

METHODS = {
    "FedAvg": "clustered", "FedBN": "fedbn", "PartialFed": "partialfed", "FedFina": "fedfina", "FedLP": "fedlp",
    "FedLPS": "fedlps", "LearnGene": "learngene", "GENE-FL": "genefl",
}  # fmt: skip
SHARDS = (("cifar10", "CIFAR-10", (4, 5)), ("cifar100", "CIFAR-100", (10, 20)),
          ("ufldl-stanford/svhn/cropped_digits", "SVHN", (4, 5)))  # fmt: skip
ALPHAS = (0.1, 0.5)
LAST = 5  # rounds that an accuracy is the mean of

KNOWN_SHARDS = {
    "FedAvg": "60.89 58.99 21.68 21.29 72.03 76.93", "FedBN": "70.93 66.90 40.22 28.60 82.17 78.23",
    "PartialFed": "68.13 63.23 45.20 32.53 83.24 81.20", "FedFina": "65.12 61.06 40.72 31.10 78.01 74.76",
    "FedLP": "62.16 67.68 42.76 33.48 86.73 82.62", "FedLPS": "41.19 36.90 40.63 28.37 83.77 75.77",
    "LearnGene": "66.05 64.91 41.63 32.07 83.71 78.45", "GENE-FL": "71.45 71.22 46.84 33.35 87.30 83.64",
}  # fmt: skip
UPLINK_SHARDS = {  # GB of 2^30 bytes over the known clients' rounds
    "FedAvg": "41.66 41.66 41.83 41.83 41.66 41.66", "FedLP": "27.22 16.24 13.18 13.35 36.31 13.96",
    "FedLPS": "16.11 13.72 - - - -", "GENE-FL": "8.78 10.33 10.26 10.45 11.19 11.22",
}  # fmt: skip
KNOWN_DIRICHLET = {
    "FedAvg": "45.69 32.15 12.02 13.23 40.25 45.78", "FedBN": "50.92 48.47 18.44 16.40 53.95 61.15",
    "PartialFed": "63.76 53.12 22.49 17.04 62.26 42.16", "FedFina": "60.35 48.44 23.20 17.16 59.98 38.81",
    "FedLP": "57.46 66.45 17.07 20.74 60.74 71.81", "FedLPS": "48.25 35.40 13.02 16.58 52.88 29.86",
    "LearnGene": "62.25 51.95 22.49 15.48 59.28 51.19", "GENE-FL": "64.85 65.61 22.74 22.46 63.53 70.79",
}  # fmt: skip
UPLINK_DIRICHLET = {"GENE-FL": "11.54 15.73 10.73 12.45 12.51 10.54"}
NEW_SHARDS = {
    "FedBN": "61.54 57.96 44.01 32.04 88.82 89.80", "PartialFed": "61.43 61.75 47.94 35.82 81.74 89.50",
    "FedFina": "54.94 51.81 41.62 30.94 87.81 86.84", "FedLP": "63.46 65.37 40.69 34.47 90.95 92.58",
    "FedLPS": "59.10 45.85 44.38 32.06 87.78 77.32", "LearnGene": "60.34 57.83 44.04 30.62 88.20 89.52",
    "GENE-FL": "66.90 67.76 49.84 37.85 89.03 90.47",
}  # fmt: skip
NEW_DIRICHLET = {
    "FedBN": "56.33 49.79 17.35 16.44 55.63 72.42", "PartialFed": "59.62 51.29 21.77 16.31 67.34 65.58",
    "FedFina": "58.10 47.65 21.04 15.47 61.67 58.78", "FedLP": "52.39 58.12 13.70 22.80 69.41 70.96",
    "FedLPS": "60.37 51.96 22.49 18.60 57.40 79.63", "LearnGene": "59.05 49.65 21.02 14.56 64.87 74.64",
    "GENE-FL": "63.85 61.44 23.62 18.73 69.86 77.11",
}  # fmt: skip


def settings(scale: Scale, dataset: str, split: dict[str, Any], method: str) -> dict[str, Any]:
    """An experiment's settings, but for the seed."""
    small = scale == "small"
    clients, known, more = (6, 10, 6) if small else (50, 100, 50)
    if small:  # `samples` with Dirichlet would be another partition
        split = split | ({"samples": "128/64"} if split["partition"] == "shards" else {"part": 0.05})
    return {
        "method": METHODS[method], "dataset": dataset, "clients": clients, "newcomers": clients, "arrival": known + 1,
        "rounds": known + more, "model": "resnet18:width=8" if small else "resnet18", **split,
        "parameters": {"clusters": 2, "fraction": 0.5, "epochs": 3} if small else {"fraction": 0.2},
    }  # fmt: skip


def _arrival(run: RunFolder) -> int:
    arrival: int = run.fact("arrival")
    return arrival


def known(run: RunFolder) -> float | None:
    """The known clients' accuracy: the mean over their last rounds, after local training, in per cent."""
    curve = [value for row, value in run.curve("cohort") if row["round"] < _arrival(run)]
    return 100 * fmean(curve[-LAST:]) if curve else None


def new(run: RunFolder) -> float | None:
    """The newcomers' accuracy, likewise."""
    curve = [value for row, value in run.curve("cohort") if row["round"] >= _arrival(run)]
    return 100 * fmean(curve[-LAST:]) if curve else None


def uplink(unit: int) -> Figure:
    """What the known clients sent in all by the papers' count, in so many bytes."""

    def figure(run: RunFolder) -> float | None:
        sizes = [row["uplink_nominal_bytes"] for row in run.rounds if 0 < row["round"] < _arrival(run)]
        return sum(sizes) / unit if sizes else None

    return figure


def _cells(
    scale: Scale,
    splits: list[tuple[str, str, dict[str, Any]]],
    shown: dict[str, str],
    figure: Callable[[RunFolder], float | None],
    sizes: dict[str, str] | None = None,
) -> list[Cell]:
    """A row a method, of those that the paper shows: accuracy a column, and what was sent beside it."""
    unit, words = (2**20, "MB up") if scale == "small" else (2**30, "GB up")
    cells = []
    for row, theirs in shown.items():
        sent = printed((sizes or {}).get(row, "- " * len(splits)))
        for (dataset, title, split), mean, size in zip(splits, printed(theirs), sent, strict=True):
            own = settings(scale, dataset, split, row)
            cells.append(Cell(row, title, own, figure, mean, "cohort"))
            if sizes is not None:
                cells.append(Cell(row, f"{title}, {words}", own, uplink(unit), size))
    return cells


def _sharded() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (dataset, f"{title} s={s}", {"partition": "shards", "shards_per_client": s})
        for dataset, title, numbers in SHARDS
        for s in numbers
    ]


def _dirichlet() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (dataset, f"{title} {alpha}", {"partition": "dirichlet", "alpha": alpha})
        for dataset, title, _ in SHARDS
        for alpha in ALPHAS
    ]


def _seeds(scale: Scale) -> tuple[int, ...]:
    return (1,) if scale == "small" else (1, 2, 3)


KNOWN_UNIT = "accuracy of the cohort's own models after local training, mean of the known clients' last five rounds, %"
NEW_UNIT = "accuracy of the newcomers' own models after local training, mean of the last five rounds, %"


def table_1(scale: Scale) -> Table:
    """Known clients, classes dealt in shards."""
    cells = _cells(scale, _sharded(), KNOWN_SHARDS, known, UPLINK_SHARDS)
    return Table("GENE-FL, Table I: known clients, shards", KNOWN_UNIT, cells, (), _seeds(scale))


def table_2(scale: Scale) -> Table:
    """Known clients, Dirichlet by class."""
    cells = _cells(scale, _dirichlet(), KNOWN_DIRICHLET, known, UPLINK_DIRICHLET)
    return Table("GENE-FL, Table II: known clients, Dirichlet", KNOWN_UNIT, cells, (), _seeds(scale))


def table_3(scale: Scale) -> Table:
    """Newcomers, classes dealt in shards."""
    cells = _cells(scale, _sharded(), NEW_SHARDS, new)
    return Table("GENE-FL, Table III: newcomers, shards", NEW_UNIT, cells, (), _seeds(scale))


def table_4(scale: Scale) -> Table:
    """Newcomers, Dirichlet by class."""
    cells = _cells(scale, _dirichlet(), NEW_DIRICHLET, new)
    return Table("GENE-FL, Table IV: newcomers, Dirichlet", NEW_UNIT, cells, (), _seeds(scale))
