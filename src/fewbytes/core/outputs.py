"""Model outputs with more than logits: the user's loss takes the logits, or the whole output."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import Tensor, nn

from fewbytes.base.errors import UserError
from fewbytes.core.training import Loss

Output = Literal["logits", "whole"]


def of_output(loss: Loss | None, output: Output) -> Loss | None:
    """The loss, adapted to `output`. Raises UserError for an unknown choice, and for a whole output without a loss."""
    if output not in get_args(Output):
        raise UserError(f"output is 'logits' or 'whole', the loss's part of the model's output, not {output!r}")
    if output == "logits":
        return loss
    if loss is None:
        raise UserError("output='whole' is for a loss of your own, which takes all that the model returns: give loss=")

    @functools.wraps(loss, updated=())
    def of_whole(outputs: Any, targets: Tensor) -> Tensor:
        return loss(getattr(outputs, "whole", outputs), targets)

    of_whole.__qualname__ = getattr(loss, "__qualname__", type(loss).__name__)
    of_whole.takes_whole = True  # type: ignore[attr-defined]
    return of_whole


def takes_whole(loss: Loss | None) -> bool:
    """Whether a loss was made by `of_output` for the whole output."""
    return bool(getattr(loss, "takes_whole", False))


def logits_of(model: nn.Module, inputs: tuple[Any, ...], made: Any, whole: bool) -> Any:
    """A hook that returns an output's `logits`, if it has any; else the output itself. With `whole`, also logits of
    tuples and dicts, with the output as their attribute `whole`."""
    logits = getattr(made, "logits", made)
    if not whole:
        return logits
    if isinstance(logits, Mapping):
        logits = logits.get("logits", next(iter(logits.values()), None))
    elif isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor):
        return logits
    seen = logits.view_as(logits)  # another object, as the output would contain itself
    seen.whole = made  # type: ignore[attr-defined]
    return seen
