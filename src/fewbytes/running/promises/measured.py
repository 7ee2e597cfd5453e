"""A phase's measurements, scores and bytes."""

from __future__ import annotations

from fewbytes.core.records import means
from fewbytes.running.promises.promise import Phase, Promise, Row


class Measured(Promise):
    """Begins each line."""

    def row(self, phase: Phase) -> Row:
        """The phase, its scores, mean measurements, and bytes."""
        measured = means(phase.records.measures)
        return {
            "round": phase.round,
            "phase": phase.phase,
            **({} if phase.client is None else {"client": phase.client}),
            "cohort": phase.cohort,
            "scores": phase.scores,
            "loss": means(phase.records.losses),
            **({"validation": phase.validation} if phase.validation else {}),
            **({"details": phase.details} if phase.details else {}),
            **({"pooled": phase.pooled} if phase.pooled else {}),
            **({"by_client": phase.by_client} if phase.by_client else {}),
            **({"measured": measured} if measured else {}),
            **phase.bytes,
        }
