"""Ensembles of models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fewbytes.base.state import State, load_state


class LogitMean(nn.Module):
    """The mean of its members' logits, with equal weights. Members share inputs and classes only."""

    def __init__(self, members: Iterable[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.recipe: dict[str, Any] = {}
        """The arguments of `logit_mean`, saved in the model's file."""

    def each(self, *x: Tensor, **tensors: Tensor) -> Tensor:
        """Every member's logits, (members, n, classes)."""
        outputs = [member(*x, **tensors) for member in self.members]
        return torch.stack([getattr(each, "logits", each) for each in outputs])

    def forward(self, *x: Tensor, **tensors: Tensor) -> Tensor:
        """Samples (n, …), or those of several tensors by name, to logits (n, classes)."""
        return self.each(*x, **tensors).mean(0)


def logit_mean(recipe: Mapping[str, Any], state: State, model: Callable[[int], nn.Module]) -> LogitMean:
    """Rebuild an ensemble from the `recipe` and state of a file; `model(client)` builds a member."""
    ensemble = LogitMean(model(client) for client in recipe["clients"])
    load_state(ensemble, state)
    return ensemble
