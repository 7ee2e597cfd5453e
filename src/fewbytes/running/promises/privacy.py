"""A run's differential privacy: what it promises and has spent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.files import replacing
from fewbytes.core.client_privacy import ClientPrivacy
from fewbytes.core.promise import Privacy
from fewbytes.engines.engine import Engine
from fewbytes.running.promises.promise import Phase, Promise, Row


class Spending(Promise):
    """Counts what a run of `planned` rounds spends of its `promise`."""

    def __init__(self, promise: Privacy, planned: int, seed: int, folder: Path) -> None:
        self.promise = promise
        self.terms = f", dp {promise} over {planned} rounds"
        self.privacy = ClientPrivacy(promise, planned, seed) if promise.of == "clients" else None
        """The client-level privacy that the server enforces; None: the promise is per sample."""
        self.epsilon, self.means = 0.0, 0  # spent; noisy means so far
        self._kept = folder / "checkpoint" / "means"

    def recall(self, rows: Sequence[Row]) -> None:
        """Restore what was spent, also in rounds after the checkpoint if the run went back."""
        for row in rows:
            if spent := row.get("privacy"):
                self.epsilon, self.means = spent["epsilon"], spent.get("means", 0)
        if self.privacy is not None and self._kept.exists():
            self.means = max(self.means, int(self._kept.read_text()))
            self.epsilon = self.privacy.epsilon(self.means)

    def restore(self, rows: Sequence[Row], left: int) -> None:
        """Raises UserError if the remaining rounds may need more noisy means than were promised."""
        unspent = left if self.privacy is None else self.privacy.rounds - self.means
        if self.privacy is not None and left > unspent:
            done = sum(row["phase"] == "round" for row in rows)
            raise UserError(
                f"dp: of {self.privacy.rounds} noisy means that were promised, {unspent} are not spent, too few for "
                f"the {left} rounds after round {done}: go back to a later round, or begin a new run"
            )

    def begin(self, engine: Engine) -> None:
        """Set the engine's privacy."""
        engine.privacy = self.privacy

    def after_phase(self, phase: Phase) -> None:
        """Count what is spent: per client, the noisy means; per sample, the maximum that a client reports. Raises
        UserError for more than was promised."""
        if self.privacy is None:
            entries = phase.records.measures.pop("epsilon", {}).values()
            self.epsilon = max([self.epsilon, *entries])
            return
        if self.means + phase.released > self.privacy.rounds:
            raise UserError(f"dp: all {self.privacy.rounds} noisy means that were promised are spent: begin a new run")
        self.means += phase.released
        self.epsilon = self.privacy.epsilon(self.means)

    def row(self, phase: Phase) -> Row:
        """The privacy spent so far."""
        means = {} if self.privacy is None else {"means": self.means}
        return {"privacy": {"epsilon": self.epsilon, **means}}

    def kept(self, phase: Phase) -> None:
        """Store the number of noisy means, which survives going back to an earlier checkpoint."""
        if phase.released:
            with replacing(self._kept, sync=True) as file:
                file.write(str(self.means).encode())

    def result_entries(self) -> dict[str, Any]:
        """The promise, and the privacy spent."""
        entries = {"dp": str(self.promise), "epsilon_spent": self.epsilon}
        return entries | ({} if self.privacy is None else {"noise_multiplier": self.privacy.multiplier})
