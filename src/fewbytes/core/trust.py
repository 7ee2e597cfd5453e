"""A client's check of the models it receives: the drift of the first layer from the agreed first model."""

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
    """The maximum drift of a unit of the first layer from the client's first model: 1 minus the cosine of its weights
    then and now, 0 to 2; 0 if the state has no such weights. Lengths are ignored: the next layer can compensate for
    them."""
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
    """Raises MethodError for a message whose first layer drifted by more than `most`, as in models built to separate
    images (Fowl et al., ICLR 2022). Also for other floating-point numbers than in fields marked MODEL, such as a
    control variate: their effect on the client's model cannot be checked."""
    for leaf in leaves_of(message):
        if MODEL in leaf.marks:
            if not (away := drift(problem, client, leaf.tensors)) <= most:
                raise MethodError(
                    f"a unit of the first layer of the model that it is sent has turned from the agreed first model's "
                    f"by {away:.3g}, more than the {most:g} its node allows (max-drift)"
                )
        elif any(True for _ in leaf.floats) or any(tensor.is_floating_point() for tensor in leaf.tensors.values()):
            raise MethodError(
                f"its node has a max-drift and cannot judge the {leaf.path!r} that it is sent, which is not a model "
                "for further training: use a method that sends nothing else, such as fedavg, or leave max-drift out"
            )
