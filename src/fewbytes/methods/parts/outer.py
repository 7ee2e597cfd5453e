"""The server's step in methods that take the clients' mean change of the model as a gradient (the outer step)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fewbytes.base.state import State, zeros_for_sums
from fewbytes.core.problem import Problem
from fewbytes.methods.parts.averaging import GlobalModel


@dataclass
class MovingModel(GlobalModel):
    """The server's state, if its step has momentum."""

    velocity: State  # v, of the parameters; empty, which means 0, before its first step


def learnt(problem: Problem, names: Iterable[str]) -> list[str]:
    """Those of the model's entries that are parameters; the others, such as batch-norm statistics, take no step."""
    statistics = problem.statistics(0)
    return [name for name in names if name not in statistics]


def mean_change(x: State, mean: State, names: Iterable[str]) -> State:
    """D = mean - x of the named entries, at least in float32: minus the pseudo-gradient."""
    return {name: mean[name] - x[name].to(zeros_for_sums(x[name]).dtype) for name in names}


def outer_step(
    x: State, change: State, velocity: State, lr: float, momentum: float, nesterov: bool
) -> tuple[State, State]:
    """A step of SGD with momentum from x: the entries of `change` moved, and their new velocities.

    v <- momentum v + D; x <- x + lr v or, by Nesterov, x + lr (D + momentum v).
    """
    v = {name: momentum * velocity[name] + d if name in velocity else d for name, d in change.items()}
    direction = {name: d + momentum * v[name] for name, d in change.items()} if nesterov else v
    return {name: (x[name] + lr * step).to(x[name].dtype) for name, step in direction.items()}, v
