"""What FedAdam and FedYogi share: a server that takes clients' mean change of the model as a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbytes.base.state import State, trained_entries, zeros_for_sums
from fewbytes.core.problem import Problem
from fewbytes.methods.parts.averaging import GlobalModel, first_shared, learnt_entries


@dataclass
class Moments(GlobalModel):
    """The server's state."""

    m: State  # of the parameters
    v: State


def first_moments(problem: Problem, tau: float) -> Moments:
    """The first weights, m = 0 and v = tau^2, the least the paper allows. Raises as `first_shared` does."""
    model = problem.first_model()
    theta = first_shared(problem, trained_entries(model)).theta
    m = {name: zeros_for_sums(theta[name]) for name in learnt_entries(model)}
    return Moments(theta, m, {name: torch.full_like(value, tau**2) for name, value in m.items()})


def move(
    state: Moments,
    mean: State,
    second_moment: Callable[[Tensor, Tensor], Tensor],
    beta1: float,
    server_lr: float,
    tau: float,
) -> None:
    """The server's step to what the mean of the clients' models says; batch-norm statistics become their mean.

    `second_moment`: v after a change, of v before it and the change.
    """
    theta = dict(mean)
    for name, x in ((name, state.theta[name]) for name in state.m):
        delta = mean[name] - x
        state.m[name] = beta1 * state.m[name] + (1 - beta1) * delta
        state.v[name] = second_moment(state.v[name], delta)
        theta[name] = (x + server_lr * state.m[name] / (state.v[name].sqrt() + tau)).to(x.dtype)
    state.theta = theta
