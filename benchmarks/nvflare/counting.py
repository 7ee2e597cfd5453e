"""A filter that changes nothing and counts the bytes of arrays in messages, as the filters before it left them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvflare.apis.dxo import from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable


class ByteCounter(Filter):
    """Writes a line per message to a file: `way` and the bytes."""

    def __init__(self, file: str, way: str) -> None:
        super().__init__()
        self.file, self.way = file, way

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """The same message."""
        try:
            dxo = from_shareable(shareable)
        except ValueError:
            return shareable
        size = nbytes(dxo.data) + nbytes(dxo.get_meta_prop("quant_state", {}))
        with Path(self.file).open("a") as file:
            file.write(json.dumps({"way": self.way, "bytes": size}) + "\n")
        return shareable


def nbytes(value: Any) -> int:
    """Bytes of all arrays, tensors and bytes in nested dicts."""
    if isinstance(value, dict):
        return sum(map(nbytes, value.values()))
    return len(value) if isinstance(value, bytes) else int(getattr(value, "nbytes", 0))
