"""What a client can tell of a model that it is sent: how far its first layer has turned from the agreed first one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import cosine_similarity

from fewbytes.base.errors import MethodError
from fewbytes.base.ranges import MODEL
from fewbytes.core.problem import Id, Problem
from fewbytes.wire.schema import leaves_of


def drift(problem: Problem, client: Id, state: Mapping[str, Tensor]) -> float:
    """How far the unit of the first layer that has turned most has turned from the client's first model: 1 minus the
    cosine of its weights then and now, 0 to 2; 0 where the state has no such weights. Lengths, which the next layer can
    make up for, say nothing."""
    agreed = problem.first_state(client)
    name = next((name for name, value in agreed.items() if value.ndim >= 2 and value.is_floating_point()), None)
    if name is None or name not in state:
        return 0.0
    first, sent = agreed[name].double(), state[name].double()
    if first.shape != sent.shape:
        return math.inf
    away = float((1 - cosine_similarity(first.flatten(1), sent.flatten(1))).max())
    return away if math.isfinite(away) else math.inf


def check_drift(problem: Problem, client: Id, message: Any, most: float) -> None:
    """Raises MethodError for a message whose first layer is farther than `most` from the agreed first model's: one made
    to keep images apart is (Fowl et al., ICLR 2022). Also for one with numbers that no field's MODEL vouches for, such
    as a control variate: they move a client's model to where nobody has looked."""
    for leaf in leaves_of(message):
        if MODEL in leaf.marks:
            if not (away := drift(problem, client, leaf.tensors)) <= most:
                raise MethodError(
                    f"a unit of the first layer of the model that it is sent has turned from the agreed first model's "
                    f"by {away:.3g}, more than the {most:g} its node allows (max-drift)"
                )
        elif any(True for _ in leaf.floats) or any(tensor.is_floating_point() for tensor in leaf.tensors.values()):
            raise MethodError(
                f"its node has a max-drift and cannot judge the {leaf.path!r} that it is sent, which is no model to go "
                "on from as it is: take a method that sends nothing else, such as fedavg, or leave max-drift out"
            )
