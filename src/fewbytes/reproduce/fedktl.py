"""FedKTL's Tables 1, 2 and 5: clients whose models differ.

At the paper's scale 20 clients hold a data set, their eight architectures are HtFE8, and they train for 1,000 rounds of
one local epoch; FedKTL's generator is to be named there (`--set fedktl.generator=FILE`: the paper's is StyleGAN-XL). At
the small scale a twentieth of CIFAR-10, narrow networks, 64 features, 10 rounds and our own small generator.
"""

from __future__ import annotations

from typing import Any

from fewbytes.report.folder import Direction, RunFolder
from fewbytes.reproduce.grid import Cell, Printed, Scale, Table, best, printed, traffic

METHODS = {
    "Separate": "separate", "FedKTL without transfer": "fedktl",
    "LG-FedAvg": "lg_fedavg", "FedGen": "fedgen", "FedGH": "fedgh", "FML": "fml", "FedKD": "fedkd",
    "FedDistill": "feddistill", "FedProto": "fedproto", "FedKTL": "fedktl",
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "Separate": {"momentum": 0.0, "order": "stored"}, "FedKTL without transfer": {"transfer": "none"},
}  # fmt: skip
"""What rows set besides the terms of all: those that are not the paper's, for comparison."""
RECEIVED = ("lg_fedavg", "fedgen", "fedgh", "fedproto")  # whose servers send what clients classify by
SMALL = {
    "HtFE8": "cnn4@64+resnet8:width=16@64+resnet10:width=8@64",
    "HtFE2": "cnn4@64+resnet18:width=8@64",
    "HtFE3": "resnet10:width=8,stem=7x7@64+resnet18:width=8@64+resnet26:width=8@64",
    "HtFE4": "cnn4@64+resnet6:width=16,stem=7x7@64+resnet8:width=16,stem=7x7@64+resnet18:width=8@64",
    "HtFE9": "resnet4:width=16@64+resnet6:width=16@64+resnet8:width=8@64+resnet10:width=8@64",
}
"""What stands for the paper's mixes of architectures at the small scale; its shallow ResNets have the 7x7 stem."""

TABLE_1 = {  # pathological CIFAR-10, CIFAR-100; practical CIFAR-10, CIFAR-100
    "LG-FedAvg": "86.82±0.26 57.01±0.66 84.55±0.51 40.65±0.07",
    "FedGen": "82.83±0.65 58.26±0.36 82.55±0.49 38.73±0.14",
    "FedGH": "86.59±0.23 57.19±0.20 84.43±0.31 40.99±0.51",
    "FML": "87.06±0.24 55.15±0.14 85.88±0.08 39.86±0.25",
    "FedKD": "87.32±0.31 56.56±0.27 86.45±0.10 40.56±0.31",
    "FedDistill": "87.24±0.06 56.99±0.27 86.01±0.31 41.54±0.08",
    "FedProto": "83.39±0.15 53.59±0.29 82.07±1.64 36.34±0.28",
    "FedKTL": "88.43±0.13 62.01±0.28 87.63±0.07 46.94±0.23",
}
TABLE_2 = {  # HtFE2, HtFE3, HtFE4, HtFE9; 50, 100, 200 clients
    "LG-FedAvg": "46.61±0.24 45.56±0.37 43.91±0.16 42.04±0.26 37.81±0.12 35.14±0.47 27.93±0.04",
    "FedGen": "43.92±0.11 43.65±0.43 40.47±1.09 40.28±0.54 37.95±0.25 34.52±0.31 28.01±0.24",
    "FedGH": "46.70±0.35 45.24±0.23 43.29±0.17 43.02±0.86 37.30±0.44 34.32±0.16 29.27±0.39",
    "FML": "45.94±0.16 43.05±0.06 43.00±0.08 42.41±0.28 38.47±0.14 36.09±0.28 30.55±0.52",
    "FedKD": "46.33±0.24 43.16±0.49 43.21±0.37 42.15±0.36 38.25±0.41 35.62±0.55 31.82±0.50",
    "FedDistill": "46.88±0.13 43.53±0.21 43.56±0.14 42.09±0.20 38.51±0.36 36.06±0.24 31.26±0.13",
    "FedProto": "43.97±0.18 38.14±0.64 34.67±0.55 32.74±0.82 33.03±0.42 28.95±0.51 24.28±0.46",
    "FedKTL": "48.06±0.19 49.83±0.44 47.06±0.21 50.33±0.35 43.16±0.82 39.73±0.87 34.24±0.45",
}
TABLE_5 = {  # millions of numbers up and down, all clients, a round
    "LG-FedAvg": "1.03 1.03", "FedGen": "1.03 7.66", "FedGH": "0.46 1.03", "FML": "18.50 18.50",
    "FedKD": "16.52 16.52", "FedDistill": "0.09 0.20", "FedProto": "0.46 1.02", "FedKTL": "0.09 7.17",
}  # fmt: skip


def settings(
    scale: Scale, row: str, dataset: str, split: str, models: str = "HtFE8", clients: int = 20, fraction: float = 1.0
) -> dict[str, Any]:
    """An experiment's settings, but for the seed. `split`: practical (Dirichlet 0.1) or pathological."""
    small = scale == "small"
    own: dict[str, Any] = {"epochs": 1, "lr": 0.01, "batch": 10} | OWN.get(row, {})
    own |= {} if row == "Separate" else {"fraction": fraction}
    if split == "practical":
        partition: dict[str, Any] = {"partition": "dirichlet", "alpha": 0.1, "partition_options": {"min_samples": 1}}
    else:
        partition = {"partition": "pathological", "classes_per_client": 2 if dataset == "cifar10" else 10}
    return {
        "method": METHODS[row], "dataset": dataset, **partition, "clients": clients // 2 if small else clients,
        "model": SMALL[models] if small else models, "rounds": 10 if small else 1000,
        "parameters": own, **({"part": 0.05} if small else {"evaluate_every": 5}),
    }  # fmt: skip


def received(run: RunFolder) -> float | None:
    """The best accuracy with what the server sent, before local training; None before the server has sent any."""
    sent = [row["pooled"]["combined"] for row in run.rounds if "combined" in row.get("pooled", {})]
    return 100 * max(sent) if sent else None


def both(row: str, column: str, own: dict[str, Any], paper: Printed | None) -> list[Cell]:
    """The two cells of a run: before local training, as the paper measures, and after it."""
    trained = best("micro")
    before = received if METHODS[row] in RECEIVED else trained  # others leave a model as it was trained last
    return [
        Cell(row, f"{column} received", own, before, paper, "micro"),
        Cell(row, f"{column} trained", own, trained, None, "micro"),
    ]


NOTES = (
    "FedKTL's generator is our own small one unless another is named (--set fedktl.generator=FILE); the paper's is "
    "StyleGAN-XL.",
    "The data sets' own test split, dealt like the training samples, where the paper splits both together; accuracies "
    "are taken every fifth round at the paper's scale.",
    "Of all clients' test samples together; `received` before local training, with the classifier or the prototypes "
    "that the server sent (the paper's measure; methods that send neither leave the model as it was trained last), "
    "`trained` after it. With half of the clients a round, `received` is of those alone that take part.",
    "Separate and FedKTL without transfer are not in the paper's table: they tell what local training alone scores.",
    "Pixels are in 0 to 1, not in -1 to 1.",
)
UNIT = "accuracy of the clients' models on their own test samples, best round, %"


def table_1(scale: Scale) -> Table:
    """Two partitions."""
    at = [(d, s) for s in ("pathological", "practical") for d in ("cifar10", "cifar100")]
    cells = [
        cell
        for row in METHODS
        for (dataset, split), mean in zip(at, printed(TABLE_1.get(row, "- - - -")), strict=True)
        for cell in both(row, f"{split} {dataset}", settings(scale, row, dataset, split), mean)
    ]
    notes = (*NOTES, "Flowers102 and Tiny-ImageNet are not in the grid.")
    return Table("FedKTL, Table 1", UNIT, cells, notes, (1,) if scale == "small" else (1, 2, 3))


def table_2(scale: Scale) -> Table:
    """Mixes of architectures, and more clients with half of them a round."""
    dataset = "cifar10" if scale == "small" else "cifar100"
    columns = [*((name, name, 20, 1.0) for name in ("HtFE2", "HtFE3", "HtFE4", "HtFE9")),
               *((f"{n} clients", "HtFE8", n, 0.5) for n in (50, 100, 200))]  # fmt: skip
    cells = [
        cell
        for row in METHODS
        for (column, models, clients, fraction), mean in zip(
            columns, printed(TABLE_2.get(row, "- - - - - - -")), strict=True
        )
        if scale == "paper" or clients <= 50
        for cell in both(row, column, settings(scale, row, dataset, "practical", models, clients, fraction), mean)
    ]
    notes: tuple[str, ...] = (*NOTES, "HtM10, with vision transformers, is not in the grid.")
    if scale == "small":
        notes += ("On CIFAR-10 at this scale, where the paper has CIFAR-100; half as many clients.",)
    return Table("FedKTL, Table 2", UNIT, cells, notes, (1,) if scale == "small" else (1, 2, 3))


def table_5(scale: Scale) -> Table:
    """What all clients move in a round; at the small scale thousands of numbers for CIFAR-10, with 512 features."""
    small = scale == "small"
    dataset, words, unit = ("cifar10", "thousands", 4e3) if small else ("cifar100", "millions", 4e6)
    ways: tuple[tuple[str, Direction], ...] = (("up", "uplink"), ("down", "downlink"))
    cells = []
    for row, theirs in TABLE_5.items():
        own = settings(scale, row, dataset, "practical")
        if small:
            own |= {"clients": 20, "rounds": 3, "model": own["model"].replace("@64", "@512")}
        for (column, way), mean in zip(ways, printed(theirs), strict=True):
            figure = traffic(way, first=2, count="value", clients="all", unit=unit)  # four bytes a number
            cells.append(Cell(row, column, own, figure, None if small else mean))
    notes = (
        "From the second round on, in which pairs and prototypes travel.",
        "FedKTL's download depends on its generator: the paper's 7.17 is for latents of 512 numbers, our small one has "
        "those of 128.",
    )
    return Table("FedKTL, Table 5: traffic", f"{words} of numbers that all clients move in a round", cells, notes, (1,))
