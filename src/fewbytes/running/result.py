"""The result of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from torch import nn

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.files import check_own
from fewbytes.core.ledger import Ledger
from fewbytes.models.files import NeedsModule, read_model
from fewbytes.running.result_page import moved_text, result_html, score_text


@dataclass(repr=False)
class Result:
    """What a run leaves: its summary (result.json), its rounds (rounds.jsonl), its ledger, its models.

    A notebook shows it as a small table and a chart.

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

    @classmethod
    def load(cls, folder: Path | str, build: Callable[..., nn.Module] | None = None) -> Self:
        """Read a finished or interrupted run's folder.

        `build` builds the module if the run used your own, as in `fewbytes.load_model`; without it, the
        `global_model` of such a run is None, as it is if none was saved. Raises UserError if the folder holds no such
        run, or a file of it is damaged.

        >>> import tempfile
        >>> import fewbytes as fb
        >>> import torch
        >>> x, y = torch.eye(4), torch.arange(4)
        >>> task = fb.Task.of(lambda: torch.nn.Linear(4, 4), [((x, y), (x, y))] * 2, test=(x, y))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = fb.run(fb.FedAvg(), task, rounds=2, out=f"{folder}/run")
        ...     again = fb.Result.load(f"{folder}/run")
        >>> again.score == result.score, again.ledger.totals() == result.ledger.totals()
        (True, True)
        """
        folder = Path(folder)
        if not (folder / "config.toml").is_file():
            raise UserError(f"{folder} is not a run folder: it has no config.toml")
        check_own(folder)
        if not (folder / "result.json").exists():
            raise UserError(f"{folder} has no result.json yet: the run was killed, or still runs; resume it first")
        summary = _read(folder / "result.json", json.loads)
        rows = _read(folder / "rounds.jsonl", lambda text: [json.loads(line) for line in text.splitlines()])
        if not isinstance(summary, dict) or not isinstance(summary.get("score"), dict):
            raise UserError(f"{folder / 'result.json'} is damaged: it has no score")
        try:
            ledger = Ledger.read_parquet(folder / "ledger.parquet")
        except (OSError, ValueError, KeyError, pa.ArrowException) as error:
            raise UserError(f"{folder / 'ledger.parquet'} is damaged: {one_line(error)}") from None
        return cls(folder, summary, rows, ledger, _global_model(folder, build))

    @property
    def score(self) -> float:
        """The first metric, of the kind the method's paper reports (`summary["score"]`), last round; nan: none."""
        final = self.summary["score"]["final"]
        return math.nan if final is None else float(final)

    @property
    def accuracy(self) -> float:
        """`score`, if it is an accuracy, in [0, 1]. Raises UserError if it is not."""
        if self.summary["score"]["metric"] != "accuracy":
            raise UserError(f"this run is scored by {self.summary['score']['metric']}: use result.score")
        return self.score

    def __repr__(self) -> str:
        s = self.summary
        score = score_text(s, s["score"]["final"])
        parts = [
            f"{s.get('method')}, {s.get('rounds')} rounds" + (f" ({s['status']})" if s.get("status") != "done" else ""),
            *([f"{s['score']['kind']} {s['score']['metric']} {score}"] if s["score"]["final"] is not None else []),
            moved_text(s),
            f"{s.get('seconds', 0.0):.3g} s",
        ]
        return f"<Result {str(self.folder)!r}: {'; '.join(parts)}>"

    def _repr_html_(self) -> str:
        return result_html(self.folder, self.summary, self.rounds)


def _read(file: Path, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {one_line(error)}") from None


def _global_model(folder: Path, build: Callable[..., nn.Module] | None) -> nn.Module | None:
    """The last global model; None if none was saved, or it needs a module that is not given."""
    file = folder / "models" / "global.safetensors"
    try:
        return read_model(file, build=build)[0] if file.is_file() else None
    except NeedsModule:
        return None
