"""NVFlare's messages of weights as tensors and back: DXOs of NumPy arrays, of torch tensors, or of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import FLMetaKey, ReturnCode
from nvflare.apis.shareable import Shareable, make_copy
from torch import Tensor, nn

from fewbytes.base.errors import FrameError
from fewbytes.codec.stream import COUNTER
from fewbytes.wire.layout import DTYPES

KEY = "fewbytes"
"""The name of the encoded bytes in a DXO's data, and of our header in a Shareable."""
NUMPY, OTHERS = "numpy", "others"
KINDS = (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)
"""The kinds of data that are encoded."""
TYPES = frozenset(DTYPES) - {"bfloat16"}
"""The types of NumPy arrays that are encoded."""


@dataclass(frozen=True)
class Parts:
    """The data of a DXO: tensors by name, which of them were NumPy arrays (all, none, or names), and the entries that
    are not encoded, such as texts."""

    tensors: dict[str, Tensor]
    numpy: bool | list[str]
    others: dict[Any, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for value in self.tensors.values())


def dxo_of(shareable: Shareable) -> DXO | None:
    """The weights, or difference of weights, in a message; None if there are none, or if it reports an error."""
    if shareable.get_return_code() != ReturnCode.OK:
        return None
    try:
        dxo = from_shareable(shareable)
    except ValueError:
        return None
    return dxo if dxo.data_kind in KINDS and isinstance(dxo.data, dict) else None


def parts_of(data: Mapping[Any, Any]) -> Parts | None:
    """What a DXO's data are made of; None if no entry can be encoded, or all are encoded already."""
    if is_encoded(data):
        return None
    tensors: dict[str, Tensor] = {}
    others: dict[Any, Any] = {}
    arrays = []
    for name, value in data.items():
        if isinstance(name, str) and _is_array(name, value) and value.dtype.name in TYPES:
            tensors[name] = torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C"))
            arrays.append(name)
        elif isinstance(name, str) and _travels(value):
            tensors[name] = value
        else:
            others[name] = value
    if not tensors:
        return None
    return Parts(tensors, len(arrays) == len(tensors) if len(arrays) in (0, len(tensors)) else arrays, others)


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    """A network's tensors by name, as NVFlare sends them."""
    return {name: value for name, value in network.state_dict().items() if _travels(value)}


def is_encoded(data: Mapping[Any, Any]) -> bool:
    """Whether a DXO's data were made by `encoded`."""
    return isinstance(data.get(KEY), bytes)


def encoded(message: bytes, parts: Parts) -> dict[str, Any]:
    """A DXO's data with their tensors as bytes."""
    return {KEY: message, NUMPY: parts.numpy, OTHERS: parts.others}


def decoded(data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    """Undo `parts_of`, with copies of the tensors: trainers and aggregators may change what they get. Raises FrameError
    for data that do not fit the tensors."""
    numpy, others = data.get(NUMPY), data.get(OTHERS)
    names = set(tensors) if numpy is True else set() if numpy is False else _names(numpy)
    if not isinstance(others, dict) or not names <= set(tensors) or set(others) & set(tensors):
        raise FrameError("type", "the message does not say what its tensors are")
    if any(tensors[name].dtype == torch.bfloat16 for name in names):
        raise FrameError("type", "NumPy arrays cannot be of type bfloat16")
    made = {name: value.clone() for name, value in tensors.items()}
    return {name: value.numpy() if name in names else value for name, value in made.items()} | others


def with_data(shareable: Shareable, dxo: DXO, data: dict[Any, Any], by: str) -> Shareable:
    """A message like another, with other data. The other message stays as it is: the server sends it to several
    clients."""
    meta = dict(dxo.meta or {})
    meta[FLMetaKey.FILTER_HISTORY] = [*(meta.get(FLMetaKey.FILTER_HISTORY) or []), by]
    return DXO(dxo.data_kind, data, meta).update_shareable(make_copy(shareable))


def _is_array(name: str, value: Any) -> bool:
    """Averages of batch norm's counters are scalars: left out, they would make the second model one of other names."""
    return isinstance(value, np.ndarray) or (isinstance(value, np.generic) and name.rpartition(".")[2] == COUNTER)


def _travels(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized:
        return False
    return str(value.dtype).removeprefix("torch.") in DTYPES


def _names(value: Any) -> set[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise FrameError("type", "the message does not say which of its tensors are NumPy arrays")
    return set(value)
