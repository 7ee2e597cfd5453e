"""Options given in the wrong place: finds the right place in Python."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from fewbytes.base.errors import UserError, suggestion
from fewbytes.base.settings import Group
from fewbytes.core.devices import Precision
from fewbytes.core.objective import ClassWeights
from fewbytes.core.outputs import Output
from fewbytes.core.training import Local, Loss
from fewbytes.data.split import Transform

Places = Mapping[str, Collection[str]]
"""Names of options by the Python call that takes them, such as `fb.run(…, {})`."""
OF_METHOD: Places = {"the method, as in FedAvg({})": tuple(each.name for each in fields(Local))}
"""Options of most methods."""


class Terms(TypedDict, total=False):
    """Options of a user's task, besides its model and data.

    `loss`: (outputs, targets) to a batch's mean, in place of the usual one. `metrics`: scores of models, the first is
    the main one: names (`fewbytes.core.metric_names.KNOWN`), or a mapping from names to torchmetrics' metrics or
    functions that make one. `positive`: the number of the class that metrics such as auc, sensitivity and specificity
    are of. `validation`: the share of each client's training samples held out, to choose the best model by. `weights`:
    per class, or balanced. `transform`: (x, y) to a randomly changed x, for every
    training batch. `output`: the input of `loss` if a model gives more than logits (an output of transformers, or a
    tuple or dict with `logits` or logits first): the logits, or the whole output. `seed`: of all randomness.
    `recalibrate`: see `Problem`.
    """

    loss: Loss | None
    metrics: Sequence[str] | Mapping[str, Any] | None
    positive: int | None
    validation: float
    weights: ClassWeights | None
    transform: Transform | None
    output: Output
    seed: int
    precision: Precision
    device: str
    recalibrate: bool


OF_TASK: Places = {
    "the task, fb.Task.of(…, {})": Terms.__annotations__.keys() | {"model", "test", "public", "presence"}
}
"""Options of a user's task."""


def belongs(name: str, value: Any, places: Places) -> str:
    """The right place for an option, as in `: it belongs to fb.run(…, rounds=5)`: one of these places or a run."""
    of_runs = {group.given: [each.name for each in fields(group)] for group in Group.__subclasses__() if group.given}
    plain = value is None or (isinstance(value, str | int | float) and len(repr(value)) < 40)
    given = f"{name}={value!r}" if plain else f"{name}=…"
    for place, names in {**places, **of_runs}.items():
        if name in names:
            return f": it belongs to {place.format(given)}"
    return ""


def check_options(given: Mapping[str, Any], known: Collection[str], places: Places) -> None:
    """Raises UserError for an unknown option of a task."""
    for name, value in given.items():
        if name not in known:
            raise UserError(f"a task has no option {name!r}{belongs(name, value, places) or suggestion(name, known)}")
