"""The protocol of a promise: what the loop asks of it, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, Self

import numpy as np

from fewbytes.core.ledger import LeftOut
from fewbytes.core.problem import Id
from fewbytes.core.records import ByMetric, Gathered
from fewbytes.core.standing import Comparison
from fewbytes.engines.engine import Engine

Row = dict[str, Any]
"""A line of rounds.jsonl."""


@dataclass
class Phase:
    """What came of a phase of a run: what comes before the first round (`start`), a client's `join`, a `round`, or what
    comes after the last (`finish`). `seconds`: that it took, and that its scoring took."""

    round: int
    phase: str
    client: Id | None  # who joined
    cohort: int  # how many clients took part
    bytes: dict[str, int]  # that it moved, as `Ledger.totals` has them
    records: Gathered
    left_out: list[LeftOut]
    not_finite: set[str]  # handlers of which a reply held numbers that are not
    updates: Callable[[], Mapping[Id, Comparison]]
    noted: dict[str, str]  # by the method
    staleness: list[int]
    clock: float  # simulated seconds since the run began
    released: int  # noisy means
    called: Callable[[Id], str]  # a client as people know it
    scores: ByMetric = field(default_factory=dict)
    pooled: ByMetric = field(default_factory=dict)
    seconds: tuple[float, float] = (0.0, 0.0)
    row: Row = field(default_factory=dict)  # its line; empty: it has none

    @classmethod
    def of(cls, engine: Engine, phase: str, client: Id | None, before: int) -> Self:
        """The phase that an engine has just gone through; `before`: exchanges in the ledger when it began."""
        ledger, step, roster = engine.ledger, engine.step, engine.roster
        cohort, moved = len(np.unique(ledger.columns(before)["client"])), ledger.totals(before)
        return cls(
            step.t, phase, client, cohort, moved, step.records, step.left_out, step.not_finite,
            partial(step.updates.comparisons, roster.samples_of), step.notes, step.staleness,
            engine.streaming.clock.now,
            step.released, engine.sites.called,
        )  # fmt: skip


class Take(Protocol):
    """Takes a phase of the run: its name, what is done with the server's state, and the client that it is for."""

    def __call__(self, phase: str, step: Callable[[Any], None], client: Id) -> None:
        """Raises what the step raises."""


@dataclass(frozen=True)
class Opening:
    """A round that is about to begin. `arrived`: clients that can be reached and the run does not know yet."""

    t: int
    arrived: list[Id]
    engine: Engine
    take: Take


class Promise:
    """Something that a run keeps to, or reports: override what it takes. In a list, whose order is that of the parts of
    a line and of result.json.

    State that must outlive the process is in the lines of rounds.jsonl, which a resumed run reads.
    """

    terms = ""
    """Its part of the run's fingerprint: a run resumes under the same terms only."""

    def recall(self, rows: Sequence[Row]) -> None:
        """The run resumes after these lines."""

    def restore(self, rows: Sequence[Row], left: int) -> None:
        """The run was sent back to the checkpoint after these lines, which it has recalled, and `left` rounds follow.
        Raises UserError if it may not go back that far."""

    def begin(self, engine: Engine) -> None:
        """The engine is ready, and nothing has been asked of clients yet."""

    def before_round(self, opening: Opening) -> None:
        """A round is about to begin."""

    def after_phase(self, phase: Phase) -> None:
        """A phase has been gone through, and nothing is scored or written yet. Raises UserError for what breaks it."""

    def row(self, phase: Phase) -> Row:
        """Its part of the phase's line; the phase has been scored."""
        return {}

    def kept(self, phase: Phase) -> None:
        """The checkpoint after the phase is written, and nobody has been told of the phase."""

    def notes(self, phase: Phase) -> Iterable[str]:
        """What people should know of a round, or of what came after the last."""
        return ()

    def explain(self, error: Exception) -> str:
        """What to add to an error that ends the run."""
        return ""

    def result_entries(self) -> dict[str, Any]:
        """Its part of result.json."""
        return {}


class Limit(Promise):
    """A promise that may end a run before its last round."""

    name = ""
    """What result.json calls it."""
    known: Literal["sent", "scored", "never"] = "never"
    """When it is known that a round was the last: as soon as it is over, by what was sent; once it is scored; or never,
    as the method has rounds of its own."""

    def why(self, rows: Sequence[Row]) -> str:
        """Why no round comes after these lines, in words; nothing if one does."""
        return ""
