"""Fed-KGF's Table 1 and Figure 3: what all clients send in a round, and accuracy, on CIFAR-10.

At the paper's scale ten clients train ResNet-18 on all images for 400 rounds of one local epoch. At the small scale
they hold 32 images each and train for two rounds, which is enough for the sizes; accuracies are left out.
"""

from __future__ import annotations

from typing import Any

from fewbytes.reproduce.grid import Cell, Printed, Scale, Table, final, traffic

METHODS: dict[str, tuple[str, dict[str, Any], float | None, float | None]] = {
    "FedAvg": ("fedavg", {}, 289.31, None),
    "FedCOM": ("fedcom", {}, 144.65, None),
    "FedPM": ("fedpm", {}, 91.55, 79.8),
    "DGC": ("dgc", {}, 36.16, None),
    "SmartIdx": ("smartidx", {}, 20.47, None),
    "FedCAMS": ("fedcams", {}, 13.32, None),
    "Fed-KGF (all upload)": ("fedkgf", {"owners": 0}, 13.20, None),
    "Fed-KGF": ("fedkgf", {}, 8.46, 81.0),
    "Fed-KGF (common)": ("fedkgf", {"common": True}, None, None),
}
"""Name, parameters beside those of local training, the paper's MB and its accuracy for IID clients."""


def settings(scale: Scale, partition: str, method: str) -> dict[str, Any]:
    """An experiment's settings, but for the seed."""
    small = scale == "small"
    name, own, *_ = METHODS[method]
    rounds = 2 if small else 400
    local: dict[str, Any] = {"epochs": 1, "batch": 32 if small else 64, "lr_rounds": rounds}
    if name != "fedpm":  # which trains by Adam
        local |= {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
    return {
        "method": name, "dataset": "cifar10", "partition": partition, "clients": 10, "model": "resnet18",
        "rounds": rounds, "augment": "crop-flip", "parameters": {**local, **own},
        **({"part": 0.03, "samples": "32/16"} if small else {"evaluate_every": 10}),
    }  # fmt: skip


def _printed(value: float | None) -> Printed | None:
    return None if value is None else Printed(value)


def table_1(scale: Scale) -> Table:
    """Traffic and accuracy of the compressed methods."""
    cells = []
    for row, (_, _, size, accuracy) in METHODS.items():
        own = settings(scale, "iid", row)
        cells += [
            Cell(row, "MB up a round", own, traffic("uplink", clients="all"), _printed(size)),
            Cell(row, "as sent (10⁶ bytes)", own, traffic("uplink", count="sent", clients="all")),
        ]
        if scale == "small":
            continue
        cells += [
            Cell(row, f"accuracy % {words}", settings(scale, partition, row), final("global"), figure, "global")
            for partition, words, figure in (
                ("iid", "IID", _printed(accuracy)),
                ("main-category", "80 % main class", None),
            )
        ]
    return Table(
        "Fed-KGF, Table 1 and Figure 3",
        "what all clients send in a round, MB of 2^20 bytes by the paper's count"
        + (", and accuracy on the test set" if scale == "paper" else ""),
        cells,
        (
            "The paper's MB follow no single count: 289.31 for FedAvg is 10 models of 7.58 million values, ResNet-18 "
            "has 11.17 million.",
            *(
                []
                if scale == "small"
                else ["The paper's accuracies stand beside both splits in its text: taken for IID."]
            ),
            "Fed-KGF (common) sends classifiers and normalisations from every client (our variant, not in the paper).",
        ),
        (1,) if scale == "small" else (1, 2, 3),
    )
