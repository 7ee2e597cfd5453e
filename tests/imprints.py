"""First layers made to keep images apart that hide what they are for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import fewbytes as fb
from fewbytes.analysis.imprint import first_layer


def hidden(task: fb.Task, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A first layer made to keep images apart, with half of its units as agreed, and the others of a twentieth of their
    length, which the next layer makes up for."""
    agreed, state = task.problem.first_state(0), {name: value.clone() for name, value in made.items()}
    one, two = first_layer(task.problem.on_cpu().model(0))
    kept = len(state[f"{one}weight"]) // 2
    for part in ("weight", "bias"):
        state[f"{one}{part}"] *= 0.05
        state[f"{one}{part}"][:kept] = agreed[f"{one}{part}"][:kept]
    state[f"{two}weight"] /= 0.05
    state[f"{two}weight"][:, :kept] = agreed[f"{two}weight"][:, :kept]
    return state
