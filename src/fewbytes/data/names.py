"""The public names of `fewbytes.data`."""

from __future__ import annotations

from fewbytes.base.python_words import in_python
from fewbytes.data.clients import Dataset, FederatedData
from fewbytes.data.datasets import client_folders, holds_table
from fewbytes.data.datasets import load_dataset as load
from fewbytes.data.federated import federate, federate_local, federate_partition
from fewbytes.data.masks import masks_of_boxes
from fewbytes.data.own import is_function, own_data
from fewbytes.data.public import with_public
from fewbytes.data.schema import Schema
from fewbytes.data.settings import PARTITIONS, Partition
from fewbytes.data.split import ClientData, Kind, Split, Targets, Transform
from fewbytes.data.tables import table
from fewbytes.data.text import holds_text, load_text
from fewbytes.data.transforms import (
    AUGMENTATIONS,
    chain,
    crop_flip,
    flip_rotate15_crop,
    rotate20_flip,
    stamp_shapes,
    with_transforms,
)
from fewbytes.data.validation import hold_out

load_dataset = in_python("schema=Schema({})")(load)

__all__ = [
    "AUGMENTATIONS",
    "PARTITIONS",
    "ClientData",
    "Dataset",
    "FederatedData",
    "Kind",
    "Partition",
    "Schema",
    "Split",
    "Targets",
    "Transform",
    "chain",
    "client_folders",
    "crop_flip",
    "federate",
    "federate_local",
    "federate_partition",
    "flip_rotate15_crop",
    "hold_out",
    "holds_table",
    "holds_text",
    "is_function",
    "load_dataset",
    "load_text",
    "masks_of_boxes",
    "own_data",
    "rotate20_flip",
    "stamp_shapes",
    "table",
    "with_public",
    "with_transforms",
]
