"""The result of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.core.ledger import Ledger


@dataclass
class Result:
    """What a run leaves: its summary (result.json), its rounds (rounds.jsonl), its ledger, its models.

    >>> import fewbytes as fb
    >>> import torch
    >>> x, y = torch.eye(4), torch.arange(4)
    >>> task = fb.Task.of(lambda: torch.nn.Linear(4, 4), [((x, y), (x, y))] * 2, test=(x, y))
    >>> result = fb.run(fb.FedAvg(), task, rounds=2)
    >>> result.summary["status"], [row["round"] for row in result.rounds], result.global_model
    ('done', [1, 2], Linear(in_features=4, out_features=4, bias=True))
    """

    folder: Path
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    ledger: Ledger
    global_model: nn.Module | None

    @property
    def score(self) -> float:
        """The first metric, of the kind the method's paper reports (`summary["score"]`), last round; nan: none."""
        final = self.summary["score"]["final"]
        return math.nan if final is None else float(final)

    @property
    def accuracy(self) -> float:
        """`score`, where that is an accuracy, in [0, 1]. Raises UserError where it is not."""
        if self.summary["score"]["metric"] != "accuracy":
            raise UserError(f"this run is scored by {self.summary['score']['metric']}: take result.score")
        return self.score
