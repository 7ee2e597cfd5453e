"""Watchers: objects to which a run reports its progress."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbytes.base.errors import UserError

if TYPE_CHECKING:
    from fewbytes.core.problem import Id


class Watcher:
    """Receives a run's events; override the methods for those you need.

    A run begins with `started`, after `waiting` on Flower. Each of its steps (a round, a client that joins, what comes
    before the first round and after the last) calls `replied` as clients answer and, when its checkpoint is written,
    `moved`; after that a round calls `scored`, and a client that came `joined` or `refused`. `ended` is last.
    All calls come from the process of the run's loop, and change nothing in the run. An exception in a watcher ends the
    run, which can be resumed.

    >>> import fewbytes as fb
    >>> import torch
    >>> class Printing(fb.Watcher):
    ...     def scored(self, row):
    ...         print("round", row["round"], sorted(row["scores"]["accuracy"]))
    ...
    ...     def ended(self, result):
    ...         print(result["status"])
    >>> x, y = torch.eye(4), torch.arange(4)
    >>> task = fb.Task.of(lambda: torch.nn.Linear(4, 4), [((x, y), (x, y))], test=(x, y))
    >>> result = fb.run(fb.FedAvg(), task, rounds=2, watcher=Printing())
    round 1 ['global', 'personalised']
    round 2 ['global', 'personalised']
    done
    """

    def started(self, folder: Path, rounds: int, done: int) -> None:
        """The run in a folder starts, or resumes with `done` of `rounds` rounds finished. The folder holds config.toml
        and, if resumed, all lines of rounds.jsonl so far."""

    def waiting(self, there: int, wanted: int) -> None:
        """The run waits for `wanted` clients to connect; `there` have."""

    def replied(self, client: Id) -> None:
        """A client's exchange has ended."""

    def awaited(self, clients: Sequence[str]) -> None:
        """The run has been waiting for these clients for a while: to connect, or to reply (on Flower)."""

    def joined(self, client: Id) -> None:
        """A new client has joined the run."""

    def refused(self, client: Id, why: str) -> None:
        """A new client cannot join; the run continues without it."""

    def moved(self, uplink_bytes: int, downlink_bytes: int) -> None:
        """Bytes that the whole run has moved so far: called when it starts, and after each step."""

    def scored(self, row: dict[str, Any]) -> None:
        """A line of rounds.jsonl has been written: of a round, scored or not, or of what came after the last.

        `row`: "round" (from 1; after the last, one more), "phase" ("round" or "finish"), "scores" by metric and kind,
        such as `row["scores"]["accuracy"]["global"]` (empty: not scored), "loss" by name, "uplink_bytes" and
        "downlink_bytes" of this step, "cohort" (how many clients took part), "seconds", "seconds_scoring", and where
        there are any "measured", "pooled", "by_client" (scores by metric, kind and client, if these are few),
        "left_out", "not_finite", "notes", "software" (by client, versions at its node that are not the server's, once),
        "staleness" (of a stream's replies, mean) and "simulated_seconds" (since the run began).
        """

    def note(self, text: str) -> None:
        """A note for the user, such as the first loss that is not finite. Unless overridden, it warns."""
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    def stopped(self, t: int, why: str) -> None:
        """Round t was the last, before the requested number: another would exceed the budget, or `stop_when` holds."""

    def ended(self, result: dict[str, Any]) -> None:
        """The run has ended: the content of result.json, `status` done or interrupted; after a failure only `status`
        and `why`."""


EVENT_NAMES = ("waiting", "replied", "awaited", "joined", "refused", "moved", "scored", "note", "stopped")
"""The events of a running run, by the names of a watcher's methods; all arguments can be written as JSON."""


class Recorder(Watcher, ABC):
    """A watcher that writes to another store, which may fail without ending the run.

    Its first failure becomes a note; it then gets no more events of that run, which continues.
    """

    @abstractmethod
    def place(self) -> str:
        """The name of its store, for messages."""


def _passing(event: str) -> Callable[..., None]:
    return lambda self, *what: self.pass_on(event, *what)


class Passing(Watcher, ABC):
    """Passes on whatever happens."""

    @abstractmethod
    def pass_on(self, event: str, *what: Any) -> None:
        """One of a watcher's methods was called, with these arguments."""

    started = _passing("started")
    waiting = _passing("waiting")
    replied = _passing("replied")
    awaited = _passing("awaited")
    joined = _passing("joined")
    refused = _passing("refused")
    moved = _passing("moved")
    scored = _passing("scored")
    note = _passing("note")
    stopped = _passing("stopped")
    ended = _passing("ended")


WatcherLike = Watcher | Callable[[dict[str, Any]], object]
"""A watcher, or a function that is called as its `scored`."""


def together(given: WatcherLike | Sequence[WatcherLike]) -> Watcher:
    """One watcher that passes on to all. Raises UserError for what is none."""
    many = given if isinstance(given, Sequence) else [given]
    for each in many:
        if not isinstance(each, Watcher) and not callable(each):
            raise UserError(f"a watcher is a fewbytes.Watcher, or a function of a row, not {each!r}")
    return _Together([each if isinstance(each, Watcher) else _Called(each) for each in many])


class _Called(Watcher):
    """A function of a row."""

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self._function = function

    def scored(self, row: dict[str, Any]) -> None:
        self._function(row)


class _Together(Passing):
    """To one watcher after another."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = list(watchers)

    def pass_on(self, event: str, *what: Any) -> None:
        for each in list(self._watchers):
            try:
                getattr(each, event)(*what)
            except Exception as error:
                if not isinstance(each, Recorder):
                    raise
                self._watchers.remove(each)
                why = " ".join(str(error).split()) or type(error).__name__
                self.note(f"{each.place()} failed and logs nothing more of this run, which continues: {why}")

    def note(self, text: str) -> None:
        """To those that show notes; if none does, it is one warning."""
        showing = [each for each in self._watchers if type(each).note is not Watcher.note]
        for each in showing:
            each.note(text)
        if not showing:
            Watcher.note(self, text)
