"""Mean and standard deviation of samples' channels."""

from __future__ import annotations

import torch

from fewbytes.base.errors import UserError
from fewbytes.data.split import Split

CHUNK = 1000  # samples read at a time


def channel_figures(split: Split) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel (the first dimension) over all samples as `load` returns them. Raises
    UserError for integer samples."""
    total = torch.zeros(split.shape[0], dtype=torch.float64)
    squares, values = torch.zeros_like(total), 0
    for turn in ("mean", "std"):
        for start in range(0, len(split), CHUNK):
            x = split.take(range(start, min(start + CHUNK, len(split)))).load()[0]
            if not x.is_floating_point():
                raise UserError("normalise is for floating-point samples: samples here are integers")
            x = x.double().transpose(0, 1).flatten(1)
            if turn == "mean":
                total += x.sum(1)
                values += x.shape[1]
            else:
                squares += (x - (total / values)[:, None]).square().sum(1)
    return (total / values).tolist(), (squares / values).sqrt().tolist()
