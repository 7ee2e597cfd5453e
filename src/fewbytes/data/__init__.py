"""Data: data sets by name, and their partition over clients."""

from __future__ import annotations

from fewbytes.data.datasets import load_dataset
from fewbytes.data.partition import PARTITIONS, federate, federate_partition
from fewbytes.data.public import with_public
from fewbytes.data.split import ClientData, Dataset, FederatedData, Split

__all__ = [
    "PARTITIONS",
    "ClientData",
    "Dataset",
    "FederatedData",
    "Split",
    "federate",
    "federate_partition",
    "load_dataset",
    "with_public",
]
