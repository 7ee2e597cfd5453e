"""What a client can tell of a model that it is sent: how far its first layer has turned from the agreed first one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import cosine_similarity

from fewbytes.base.errors import MethodError
from fewbytes.core.admission import entries_of
from fewbytes.core.problem import Id, Problem


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
    to keep images apart is (Fowl et al., ICLR 2022)."""
    for f in dataclasses.fields(message) if dataclasses.is_dataclass(message) else ():
        if (away := drift(problem, client, entries_of(getattr(message, f.name)))) > most:
            raise MethodError(
                f"a unit of the first layer of the model that it is sent has turned from the agreed first model's by "
                f"{away:.3g}, more than the {most:g} its node allows (max-drift)"
            )
