"""Imported before NVFlare's 8-bit and 4-bit quantisers, has them run on the CPU: what asks for a GPU stays where it is.

On the CPU, bitsandbytes gives decoded vectors another dimension, so their shape is restored.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes.functional as functional
import torch
from torch import Tensor

_original = functional.dequantize_4bit


def _dequantised(data: Tensor, state: Any, **values: Any) -> Tensor:
    return _original(data, state, **values).reshape(state.shape)


torch.Tensor.cuda = lambda tensor, *_, **__: tensor
functional.dequantize_4bit = _dequantised
