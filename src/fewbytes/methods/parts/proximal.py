"""A proximal term, which keeps a model near another one during training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fewbytes.base.state import State


def proximal(weight: float, near: State, device: str) -> Callable[[nn.Module], Tensor]:
    """For `site.fit(…, extra=…)`: weight / 2 ||w - near||^2, over a model's trained parameters w."""
    near = {name: value.to(device) for name, value in near.items()}

    def term(model: nn.Module) -> Tensor:
        moved = [(p - near[name]).square().sum() for name, p in model.named_parameters() if p.requires_grad]
        return weight / 2 * torch.stack(moved).sum()

    return term
