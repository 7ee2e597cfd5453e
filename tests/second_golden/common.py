"""What the files of the second set share: their lists, tensors by name, derivatives, a step of SGD."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.random import Generator
from torch import Tensor

Arrays = dict[str, Any]
FIRST = Path(__file__).parents[1] / "golden"
ARCHIVES: dict[str, tuple[Callable[..., Arrays], Callable[..., Arrays]]] = {}
"""Per archive: (its inputs of a random generator, its expected values of the inputs)."""
TABLES: dict[str, tuple[Any, Callable[[Any], Any]]] = {}
"""Per JSON file: (its configurations, what is expected of them)."""


def archive(name: str, inputs: Callable[[Generator], Arrays]) -> Callable[[Callable[..., Arrays]], Any]:
    """Registers the function below it as what makes the expected values of a file.

    An input that is None only names a case, as the first set's expected values do: it is not written.
    """

    def registered(answers: Callable[..., Arrays]) -> Callable[..., Arrays]:
        ARCHIVES[name] = inputs, answers
        return answers

    return registered


def under(v: Arrays, prefix: str) -> dict[str, Tensor]:
    """Copies of all tensors below a prefix, float64."""
    found = {k.removeprefix(prefix): torch.from_numpy(np.array(a)) for k, a in v.items() if k.startswith(prefix)}
    return {k: t.double() if t.is_floating_point() else t for k, t in found.items()}


def put(prefix: str, values: dict[str, Tensor]) -> Arrays:
    """The other way round."""
    return {f"{prefix}{k}": t.detach().numpy().copy() for k, t in values.items()}


def endings(v: Arrays, prefix: str, split: str = "__") -> list[str]:
    """What follows a prefix in names: the cases of the first set; the inputs of the second name theirs alike."""
    return list(dict.fromkeys(k.removeprefix(prefix).split(split)[0] for k in v if k.startswith(prefix)))


def slopes(loss: Tensor, params: dict[str, Tensor]) -> dict[str, Tensor]:
    """The derivatives of a number, which can be derived again; 0 where it does not depend on a tensor."""
    got = torch.autograd.grad(loss, list(params.values()), retain_graph=True, create_graph=True, allow_unused=True)
    return {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(params.items(), got, strict=True)}


def live(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies to derive by."""
    return {k: p.detach().clone().requires_grad_() for k, p in params.items()}


def norm(p: dict[str, Tensor], x: Tensor, train: bool) -> Tensor:
    """Batch normalisation, which in training moves the statistics in place."""
    return F.batch_norm(x, p["running_mean"], p["running_var"], p["weight"], p["bias"], train, 0.1, 1e-5)


def short(v: Arrays) -> Arrays:
    """Arrays of floats as float32, as those files hold them; single numbers stay."""
    return {k: a.astype(np.float32) if getattr(a, "ndim", 0) and a.dtype == np.float64 else a for k, a in v.items()}


def tracked(name: str) -> bool:
    return "running_" in name or "num_batches" in name


def step(
    state: dict[str, Tensor],
    loss: Callable[[dict[str, Tensor]], Tensor],
    lr: float,
    speed: dict[str, Tensor] | None = None,
    momentum: float = 0.0,
    clip: float = math.inf,
) -> tuple[dict[str, Tensor], float, dict[str, Tensor], dict[str, Tensor]]:
    """One step of SGD: (the state, the loss before, the gradients, the velocities); statistics move in place."""
    p = live({k: t for k, t in state.items() if not tracked(k)})
    value = loss(state | p)
    grads = {k: g.detach() for k, g in slopes(value, p).items()}
    size = float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt())
    cut = {k: g * min(1.0, clip / size) if size else g for k, g in grads.items()}
    speed = {k: momentum * speed[k] + g if speed else g for k, g in cut.items()}
    after = state | {k: p[k].detach() - lr * speed[k] for k in p}
    return after, float(value.detach()), grads, speed


def counted(state: dict[str, Tensor], passes: int = 1) -> dict[str, Tensor]:
    """With the batch counters that many passes on."""
    return {k: t + passes if "num_batches" in k else t for k, t in state.items()}
