"""Options given in the wrong place: which place in Python is the right one."""

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
"""The names of options by how they are given, such as `fb.run(…, {})`."""
OF_METHOD: Places = {"the method, as in FedAvg({})": tuple(each.name for each in fields(Local))}
"""Options of most methods."""


class Terms(TypedDict, total=False):
    """What may be said of a task of one's own, beside its model and data.

    `loss`: (outputs, targets) to the mean of a batch, in place of the usual one. `metrics`: what models are scored by,
    the first is the score: names (`fewbytes.core.known_metrics.KNOWN`), or by name metrics of torchmetrics or functions
    that make one. `weights`: of classes, or balanced. `transform`: (x, y) to x, changed at random, of every training
    batch. `output`: what `loss` takes of a model that gives more than its logits (an output of transformers, or a tuple
    or dict of which `logits` or the first is that): the logits, or the whole of it. `seed`: of all randomness.
    `recalibrate`: see `Problem`.
    """

    loss: Loss | None
    metrics: Sequence[str] | Mapping[str, Any] | None
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
"""Options of a task of one's own."""


def belongs(name: str, value: Any, places: Places) -> str:
    """Where an option belongs, `: it belongs to fb.run(…, rounds=5)`: to one of these places or to a run."""
    of_runs = {group.given: [each.name for each in fields(group)] for group in Group.__subclasses__() if group.given}
    plain = value is None or (isinstance(value, str | int | float) and len(repr(value)) < 40)
    given = f"{name}={value!r}" if plain else f"{name}=…"
    for place, names in {**places, **of_runs}.items():
        if name in names:
            return f": it belongs to {place.format(given)}"
    return ""


def check_options(given: Mapping[str, Any], known: Collection[str], places: Places) -> None:
    """Raises UserError for an option of a task that is not one of the known ones."""
    for name, value in given.items():
        if name not in known:
            raise UserError(f"a task has no option {name!r}{belongs(name, value, places) or suggestion(name, known)}")
