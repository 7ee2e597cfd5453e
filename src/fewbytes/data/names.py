"""What the package offers."""

from __future__ import annotations

from fewbytes.data.datasets import client_folders, load_dataset
from fewbytes.data.federated import federate, federate_local, federate_partition
from fewbytes.data.public import with_public
from fewbytes.data.settings import PARTITIONS, Partition
from fewbytes.data.split import ClientData, Dataset, FederatedData, Kind, Split, Targets, Transform
from fewbytes.data.text import holds_text, load_text
from fewbytes.data.transforms import chain, crop_flip, stamp_shapes, with_transforms

__all__ = [
    "PARTITIONS",
    "ClientData",
    "Dataset",
    "FederatedData",
    "Kind",
    "Partition",
    "Split",
    "Targets",
    "Transform",
    "chain",
    "client_folders",
    "crop_flip",
    "federate",
    "federate_local",
    "federate_partition",
    "holds_text",
    "load_dataset",
    "load_text",
    "stamp_shapes",
    "with_public",
    "with_transforms",
]
