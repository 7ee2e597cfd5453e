"""GENE-FL's Tables I to IV: known clients, then newcomers with classes the known ones do not hold.

At the paper's scale 50 known clients and 50 newcomers, ten a round, train ResNet-18 for 100 rounds and 50 more. At the
small scale six and six, three a round, train an eighth of its width for ten rounds and six more.
"""

from __future__ import annotations

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
LOCAL = {"lr": 0.01, "batch": 64, "momentum": 0.9}  # of all rows alike, as are the clusters

KNOWN_SHARDS = {
    "FedAvg": "60.89 58.99 21.68 21.29 72.03 76.93", "FedBN": "70.93 66.90 40.22 28.60 82.17 78.23",
    "PartialFed": "68.13 63.23 45.20 32.53 83.24 81.20", "FedFina": "65.12 61.06 40.72 31.10 78.01 74.76",
    "FedLP": "62.16 67.68 42.76 33.48 86.73 82.62", "FedLPS": "41.19 36.90 40.63 28.37 83.77 75.77",
    "LearnGene": "66.05 64.91 41.63 32.07 83.71 78.45", "GENE-FL": "71.45 71.22 46.84 33.35 87.30 83.64",
}  # fmt: skip
UPLINK_SHARDS = {  # GB of 2^30 bytes over the known clients' rounds
    "FedAvg": "41.66 41.66 41.83 41.83 41.66 41.66", "FedBN": "41.60 41.60 41.78 41.78 41.60 41.60",
    "PartialFed": "11.67 11.67 11.67 11.67 11.67 11.67", "FedFina": "30.76 30.76 30.76 30.76 30.76 30.76",
    "LearnGene": "17.85 17.85 17.85 17.85 17.85 17.85", "FedLP": "27.22 16.24 13.18 13.35 36.31 13.96",
    "FedLPS": "16.11 13.72 13.72 13.72 13.72 13.72", "GENE-FL": "8.78 10.33 10.26 10.45 11.19 11.22",
}  # fmt: skip
KNOWN_DIRICHLET = {
    "FedAvg": "45.69 32.15 12.02 13.23 40.25 45.78", "FedBN": "50.92 48.47 18.44 16.40 53.95 61.15",
    "PartialFed": "63.76 53.12 22.49 17.04 62.26 42.16", "FedFina": "60.35 48.44 23.20 17.16 59.98 38.81",
    "FedLP": "57.46 66.45 17.07 20.74 60.74 71.81", "FedLPS": "48.25 35.40 13.02 16.58 52.88 29.86",
    "LearnGene": "62.25 51.95 22.49 15.48 59.28 51.19", "GENE-FL": "64.85 65.61 22.74 22.46 63.53 70.79",
}  # fmt: skip
UPLINK_DIRICHLET = {
    name: UPLINK_SHARDS[name] for name in ("FedAvg", "FedBN", "PartialFed", "FedFina", "LearnGene")
} | {
    "FedLP": "33.67 32.01 24.74 24.05 37.09 36.18", "FedLPS": "16.11 16.11 16.18 16.18 13.06 16.11",
    "GENE-FL": "11.54 15.73 10.73 12.45 12.51 10.54",
}  # fmt: skip
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
        "parameters": LOCAL | (
            {"clusters": 2, "fraction": 0.5, "epochs": 3} if small else {"clusters": 4, "fraction": 0.2, "epochs": 10}
        ),
    }  # fmt: skip


def _arrival(run: RunFolder) -> int:
    arrival: int = run.fact("arrival")
    return arrival


def accuracy(row: str, last: int, late: bool) -> Figure:
    """The mean over the last rounds with the known clients, or with the newcomers (`late`), in per cent."""

    def figure(run: RunFolder) -> float | None:
        curve = [value for at, value in run.curve(kind(row)) if (at["round"] >= _arrival(run)) == late]
        return 100 * fmean(curve[-last:]) if curve else None

    return figure


def kind(row: str) -> str:
    """The accuracy that the paper reports of a method: FedAvg's models as they come from the server, others' own."""
    return "combined" if row == "FedAvg" else "cohort"


def uplink(unit: int) -> Figure:
    """What the known clients sent in all by the papers' count, in so many bytes."""

    def figure(run: RunFolder) -> float | None:
        sizes = [row["uplink_nominal_bytes"] for row in run.rounds if 0 < row["round"] < _arrival(run)]
        return sum(sizes) / unit if sizes else None

    return figure


def _table(
    scale: Scale,
    title: str,
    splits: list[tuple[str, str, dict[str, Any]]],
    shown: dict[str, str],
    late: bool,
    sizes: dict[str, str] | None = None,
) -> Table:
    """A row a method, of those that the paper shows: accuracy a column, and what was sent beside it."""
    small = scale == "small"
    last, unit, words = (5, 2**20, "MB up") if small else (10, 2**30, "GB up")
    cells = []
    for row, theirs in shown.items():
        sent = printed((sizes or {}).get(row, "- " * len(splits)))
        for (dataset, column, split), mean, size in zip(splits, printed(theirs), sent, strict=True):
            own = settings(scale, dataset, split, row)
            cells.append(Cell(row, column, own, accuracy(row, last, late), mean, kind(row)))
            if sizes is not None:
                cells.append(Cell(row, f"{column} {words}", own, uplink(unit), None if small else size))
    who = "the newcomers' own models" if late else "the known clients' own models"
    told = f"accuracy of {who} after local training, mean of the last {last} rounds, %"
    notes = ["Pixels are not standardised."]
    if not small:
        notes.append("SVHN is used whole, where the paper takes a part.")
    if "FedAvg" in shown:
        notes.append("FedAvg's accuracy is of the models as they come from the server, on the next round's clients.")
    if sizes is not None:
        notes.append(
            f"{words}: what the known clients sent in all by the paper's count, "
            f"{'MB of 2^20' if small else 'GB of 2^30'} bytes; the paper's networks count at the paper's scale only."
        )
    if splits[0][2]["partition"] == "dirichlet":
        notes.append(
            "A client that holds its part of the samples gets no more of later classes; the paper tells no rule."
        )
    return Table(title, told, cells, notes, (1,) if small else (1, 2, 3))


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


def table_1(scale: Scale) -> Table:
    """Known clients, classes dealt in shards."""
    return _table(scale, "GENE-FL, Table I: known clients, shards", _sharded(), KNOWN_SHARDS, False, UPLINK_SHARDS)


def table_2(scale: Scale) -> Table:
    """Known clients, Dirichlet by class."""
    title = "GENE-FL, Table II: known clients, Dirichlet"
    return _table(scale, title, _dirichlet(), KNOWN_DIRICHLET, False, UPLINK_DIRICHLET)


def table_3(scale: Scale) -> Table:
    """Newcomers, classes dealt in shards."""
    return _table(scale, "GENE-FL, Table III: newcomers, shards", _sharded(), NEW_SHARDS, True)


def table_4(scale: Scale) -> Table:
    """Newcomers, Dirichlet by class."""
    return _table(scale, "GENE-FL, Table IV: newcomers, Dirichlet", _dirichlet(), NEW_DIRICHLET, True)
