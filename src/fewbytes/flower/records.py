"""Flower's records of arrays as NumPy arrays and back, and the record that says how a message is encoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

KEY = "fewbytes"
"""The name of the record that says how a message is encoded."""
UNKNOWN = -1
"""In place of the number of the last accepted reply: whether the last one is accepted is not known yet."""
LARGEST = 1 << 36
"""Maximum bytes of a model that a node takes from its server."""
KIND = "fewbytes/1"
"""How encoded arrays name their contents."""
TYPES = frozenset({"float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"})
"""The types of arrays that are encoded."""
Arrays = dict[str, NDArray[Any]]


def arrays_of(record: ArrayRecord) -> Arrays | None:
    """The arrays of a record by name; None if one of them is of a kind that is not encoded."""
    if not all(array.stype == "numpy.ndarray" for array in record.values()):
        return None
    arrays = {name: array.numpy() for name, array in record.items()}  # apps of the old style leave array.dtype empty
    return arrays if all(array.dtype.name in TYPES for array in arrays.values()) else None


def record_of(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """A record of arrays by name."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def encoded(data: bytes) -> ArrayRecord:
    """Encoded arrays as a record of one array."""
    return ArrayRecord({KEY: Array("uint8", (len(data),), KIND, data)})


def data_of(record: ArrayRecord) -> bytes:
    """Undo `encoded`; empty for a record of something else."""
    array = record.get(KEY)
    return array.data if array is not None and array.stype == KIND else b""


def nbytes(content: RecordDict) -> int:
    """The bytes of all arrays in a message, as they travel."""
    return sum(len(array.data) for record in content.array_records.values() for array in record.values())


def with_records(content: RecordDict, records: Mapping[str, Any], about: ConfigRecord | None) -> RecordDict:
    """A message's content with other array records, and with what says how it is encoded (None: nothing)."""
    changed = RecordDict({name: records.get(name, record) for name, record in content.items() if name != KEY})
    if about is not None:
        changed[KEY] = about
    return changed
