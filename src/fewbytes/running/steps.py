"""A step of a run that fails: it is taken again without whose replies broke it, or its error says where that was."""

from __future__ import annotations

from collections.abc import Callable

from fewbytes.base.errors import FewbytesError, MethodError, raised_at
from fewbytes.core.policy import TooFewReplies
from fewbytes.core.problem import Id
from fewbytes.engines.engine import Engine

MOST_GUESSES = 3  # of whose reply made a method raise, before that is taken for the method's own mistake


def take(
    engine: Engine,
    begin: Callable[[], None],
    step: Callable[[], None],
    go_back: Callable[[], None],
    note: Callable[[str], None],
    patient: bool,
) -> None:
    """Begin and take a step; again without them if clients' replies made the method raise, or, where the run is
    `patient`, later, if too few answered. `go_back`: forget what it has done."""
    engine.fresh()
    tries, guesses = 0, 0
    first: Exception | None = None  # what the method raised, as is told if nobody is to blame
    while True:
        blamed: list[Id] = []
        begin()
        try:
            step()
            engine.scheduler.idle()
            blamed = engine.blame.strange()
            if not blamed:
                return
        except TooFewReplies:
            engine.scheduler.abandon()
            tries += 1
            if first is not None or not patient or not engine.sites.patient(tries):
                raise
        except Exception as error:
            first = first or error
            blamed = [] if _of_the_author(error) else engine.blamed(error)
            guesses += len(blamed) == 1
            if not blamed or guesses > MOST_GUESSES:
                raise first from None
        if blamed:
            who = ", ".join(engine.sites.called(i) for i in blamed)
            note(f"round {engine.step.t}: taken again without {who}: {engine.blame.barred[blamed[0]]}")
        go_back()


def _of_the_author(error: Exception) -> bool:
    """Whether no client's reply can have made a method's server half raise this: a name that nowhere is, an attribute
    that objects of a class do not have."""
    if isinstance(error, AttributeError):
        return error.obj is not None
    return isinstance(error, NameError | ImportError)


def say_where(error: Exception, method: str, t: int) -> None:
    """Have an error of the method's server half say in which method, round and line it was raised."""
    if not isinstance(error, FewbytesError):
        error.add_note(f"{method}, round {t}")
    elif isinstance(error, MethodError) and not getattr(error, "__notes__", None):  # which a handler's has
        place = raised_at(error, own_code=True)
        error.args = (f"{method}, round {t}: {error}{f' ({place})' if place else ''}",)
