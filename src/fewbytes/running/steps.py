"""Steps that fail: a step is repeated without the clients whose replies broke it, or its error states where."""

from __future__ import annotations

from collections.abc import Callable

from fewbytes.base.errors import FewbytesError, MethodError, raised_at
from fewbytes.core.policy import TooFewReplies
from fewbytes.core.problem import Id
from fewbytes.engines.engine import Engine

MOST_GUESSES = 3  # clients suspected by guess, before the error counts as the method's own


def take(
    engine: Engine,
    begin: Callable[[], None],
    step: Callable[[], None],
    go_back: Callable[[], None],
    note: Callable[[str], None],
    patient: bool,
) -> None:
    """Take a step. Repeat it without clients whose replies made the method raise, or, if the run is `patient`, later
    when too few clients answered. `go_back`: undoes a step."""
    engine.fresh()
    tries, guesses = 0, 0
    first: Exception | None = None  # the method's first error, raised if no client caused it
    while True:
        suspected: list[Id] = []
        begin()
        try:
            step()
            engine.scheduler.idle()
            suspected = engine.suspects.outliers()
            if not suspected:
                return
        except TooFewReplies:
            engine.scheduler.abandon()
            tries += 1
            if first is not None or not patient or not engine.sites.patient(tries):
                raise
        except Exception as error:
            first = first or error
            suspected = [] if _of_the_author(error) else engine.suspected(error)
            guesses += len(suspected) == 1
            if not suspected or guesses > MOST_GUESSES:
                raise first from None
        if suspected:
            who = ", ".join(engine.sites.called(i) for i in suspected)
            note(f"round {engine.step.t}: repeated without {who}: {engine.suspects.barred[suspected[0]]}")
        go_back()


def _of_the_author(error: Exception) -> bool:
    """Whether an error of a method's server half cannot come from a client's reply: an undefined name, a missing
    attribute."""
    if isinstance(error, AttributeError):
        return error.obj is not None
    return isinstance(error, NameError | ImportError)


def add_place(error: Exception, method: str, t: int) -> None:
    """Add method, round and line to an error of the method's server half."""
    if not isinstance(error, FewbytesError):
        error.add_note(f"{method}, round {t}")
    elif isinstance(error, MethodError) and not getattr(error, "__notes__", None):  # which a handler's has
        place = raised_at(error, own_code=True)
        error.args = (f"{method}, round {t}: {error}{f' ({place})' if place else ''}",)
