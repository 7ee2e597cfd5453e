"""A dataset's partition among clients without a run: its counts, and how much the clients differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import clients_data
from fewbytes.report.partition_figure import total
from fewbytes.report.records import Partition


def partition_of(settings: Mapping[str, Any]) -> tuple[Partition, list[str], str]:
    """The partition that an experiment's settings make, as in a run's partition.json; notes on it; and a title.

    Raises UserError for settings that a run would refuse, too.
    """
    experiment = make_experiment({**settings, "method": "fedavg", "parameters": {}})
    loaded = clients_data(experiment)
    data = loaded.federated
    counts = data.label_counts()
    found = Partition(classes=counts["classes"], train=counts["train"], test=counts["test"])
    if data.names:
        found["names"] = list(data.names)
    if data.validation is not None:
        found["validation"] = [
            torch.bincount(client.validation.labels, minlength=len(found["classes"])).tolist()
            for client in data.clients
            if client.validation is not None
        ]
    how = experiment.partition.partition
    return found, [*loaded.notes, _differences(found)], f"{experiment.data.dataset}, {how}"


def _differences(partition: Partition) -> str:
    """How much the clients differ, in a line."""
    rows = [row for row in partition["train"] if isinstance(row, list)]
    sizes, held = [total(row) for row in rows], [sum(map(bool, row)) for row in rows]
    pooled = [sum(column) for column in zip(*rows, strict=True)]
    apart = [
        sum(abs(n / size - of / sum(pooled)) for n, of in zip(row, pooled, strict=True)) / 2
        for row, size in zip(rows, sizes, strict=True)
    ]
    return (
        f"{len(rows)} client{'s' * (len(rows) > 1)} with {_range(sizes)} training samples of {_range(held)} "
        f"classes; the class shares of a client differ from all clients' by {sum(apart) / len(apart):.0%} on average "
        "(total variation: 0% the same, 100% no class in common)"
    )


def _range(values: list[int]) -> str:
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"
