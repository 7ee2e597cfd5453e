"""The protocol of a promise: the methods that the loop calls, and when."""

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

RECEIVED = "received"
"""The kind of validation scores of the models that clients received in a round: of the round before."""
Row = dict[str, Any]
"""A line of rounds.jsonl."""


@dataclass
class Phase:
    """The results of a phase of a run: `start` (before the first round), a client's `join`, a `round`, or `finish`
    (after the last). `seconds`: its duration, and that of its scoring."""

    round: int
    phase: str
    client: Id | None  # the client that joined
    cohort: int  # number of clients that took part
    bytes: dict[str, int]  # as in `Ledger.totals`
    records: Gathered
    left_out: list[LeftOut]
    not_finite: set[str]  # handlers with replies that are not finite
    updates: Callable[[], Mapping[Id, Comparison]]
    noted: dict[str, str]  # by the method
    staleness: list[int]
    clock: float  # simulated seconds since the run began
    released: int  # noisy means
    called: Callable[[Id], str]  # a client's display name
    scores: ByMetric = field(default_factory=dict)
    pooled: ByMetric = field(default_factory=dict)
    by_client: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # as of `client_scores`
    validation: ByMetric = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)  # of the last global model's predictions
    seconds: tuple[float, float] = (0.0, 0.0)
    row: Row = field(default_factory=dict)  # its line; empty: it has none

    @classmethod
    def of(cls, engine: Engine, phase: str, client: Id | None, before: int) -> Self:
        """The phase that an engine has just finished. `before`: number of exchanges in the ledger when it began."""
        ledger, step, roster = engine.ledger, engine.step, engine.roster
        cohort, moved = len(np.unique(ledger.columns(before)["client"])), ledger.totals(before)
        return cls(
            step.t, phase, client, cohort, moved, step.records, step.left_out, step.not_finite,
            partial(step.updates.comparisons, roster.samples_of), step.notes, step.staleness,
            engine.streaming.clock.now,
            step.released, engine.sites.called,
        )  # fmt: skip


class Take(Protocol):
    """Runs a phase: its name, the step on the server's state, and the client that it is for."""

    def __call__(self, phase: str, step: Callable[[Any], None], client: Id) -> None:
        """Raises what the step raises."""


@dataclass(frozen=True)
class Opening:
    """A round that is about to begin. `arrived`: reachable clients that are new to the run."""

    t: int
    arrived: list[Id]
    engine: Engine
    take: Take


class Promise:
    """A limit that a run keeps, or something that it reports: override the methods you need. The order in the list is
    the order of entries in lines and in result.json.

    State that must outlive the process belongs in the lines of rounds.jsonl, which a resumed run reads.
    """

    terms = ""
    """Its part of the run's fingerprint: a run resumes under the same terms only."""

    def recall(self, rows: Sequence[Row]) -> None:
        """The run resumes after these lines."""

    def restore(self, rows: Sequence[Row], left: int) -> None:
        """The run goes back to the checkpoint after these lines, which were recalled; `left` rounds follow. Raises
        UserError if it may not go back that far."""

    def begin(self, engine: Engine) -> None:
        """The engine is ready, and no client has been asked yet."""

    def before_round(self, opening: Opening) -> None:
        """A round is about to begin."""

    def after_phase(self, phase: Phase) -> None:
        """A phase is finished, but not scored or written yet. Raises UserError if it breaks the promise."""

    def row(self, phase: Phase) -> Row:
        """Its part of the phase's line; the phase has been scored."""
        return {}

    def kept(self, phase: Phase) -> None:
        """The checkpoint after the phase is written, but the phase is not reported yet."""

    def notes(self, phase: Phase) -> Iterable[str]:
        """Notes for the user on a round, or on the finish."""
        return ()

    def explain(self, error: Exception) -> str:
        """Text to add to an error that ends the run."""
        return ""

    def result_entries(self) -> dict[str, Any]:
        """Its part of result.json."""
        return {}


class Limit(Promise):
    """A promise that may end a run before its last round."""

    name = ""
    """Its name in result.json."""
    known: Literal["sent", "scored", "never"] = "never"
    """When it is known whether a round was the last: after the round (`sent`), after its scoring, or never, as the
    method sets its own rounds."""

    def why(self, rows: Sequence[Row]) -> str:
        """Why the run ends after these lines; empty if it continues."""
        return ""
