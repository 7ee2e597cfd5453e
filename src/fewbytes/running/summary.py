"""What result.json says of a run."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fewbytes.core.ledger import Ledger
from fewbytes.core.method import Method
from fewbytes.core.problem import Task
from fewbytes.data.split import Split
from fewbytes.running.checkpoint import VERSION


@dataclass(frozen=True)
class Outcome:
    """How a run went: `rounds` it has or will have, `refused` newcomers that were not served."""

    status: str
    rounds: int
    refused: int
    seconds: float
    peak_memory_bytes: int


def summary(
    method: Method,
    task: Task,
    rows: Sequence[dict[str, Any]],
    ledger: Ledger,
    counts: dict[str, Any],
    outcome: Outcome,
    about: dict[str, Any],
) -> dict[str, Any]:
    """The entries of result.json from the lines of rounds.jsonl and the ledger.

    `counts`: what partition.json holds. `about`: further entries. Accuracies are of who is there: if all first clients
    leave, of the rounds after that.
    """
    kinds = dict.fromkeys(kind for row in rows for kind in row["accuracy"])
    left = turnover(task, outcome.rounds)
    since = left if left and any(r["phase"] == "round" and r["round"] >= left for r in rows) else 1
    scored = [r for r in rows if r["phase"] != "join"]
    curves = {k: [(r["round"], r["accuracy"][k]) for r in scored if k in r["accuracy"]] for k in kinds}
    earlier = {k: [value for t, value in curve if t < since][-1:] for k, curve in curves.items()}
    curves = {k: later for k, curve in curves.items() if (later := [(t, value) for t, value in curve if t >= since])}
    scores = {
        kind: {
            "final": curve[-1][1],
            "best": max(value for _, value in curve),
            "best_round": max(curve, key=lambda point: point[1])[0],
        }
        for kind, curve in curves.items()
    }
    nothing = {"final": None, "best": None, "best_round": None}
    kind = method.headline if method.headline in scores else next(iter(scores), method.headline)
    whole = [row for row in rows if row["phase"] == "round"]
    exchanges = max(1, sum(row["cohort"] for row in whole))
    totals = ledger.totals()
    broken = list(dict.fromkeys(name for row in rows for name in row.get("not_finite", [])))
    return {
        "method": method.method_name,
        "parameters": method.parameters,
        **about,
        "clients": len(task.problem.clients),
        "seed": task.problem.seed,
        "rounds": len(whole),
        "status": outcome.status,
        "accuracy": {"kind": kind, **scores.get(kind, nothing), "all": scores},
        **({"turnover": since, "accuracy_before": {k: v[0] for k, v in earlier.items() if v}} if since > 1 else {}),
        "majority_class_accuracy": majority_class_accuracy(counts, task.data.test),
        **totals,
        **({"not_finite": broken} if broken else {}),
        "left_out": int((ledger.columns()["outcome"] != 0).sum()) + outcome.refused,
        "uplink_bytes_per_client_round": totals["uplink_bytes"] / exchanges,
        "downlink_bytes_per_client_round": totals["downlink_bytes"] / exchanges,
        "seconds": round(outcome.seconds, 3),
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "versions": versions(),
    }


def turnover(task: Task, rounds: int) -> int | None:
    """The first round in which nobody is there of those who were in round 1; None if somebody always is."""
    first = set(task.problem.clients_in(1))
    return next((t for t in range(2, rounds + 1) if not first & set(task.problem.clients_in(t))), None)


def majority_class_accuracy(counts: dict[str, Any], server_test: Split) -> dict[str, float]:
    """What guessing scores: `global` the commonest training class on the server's test set (of the classes in it),
    `personalised` the mean over clients of each one's own commonest class on its test split. None for detection, and
    where a node does not say its client's labels."""
    labelled = all(isinstance(row, list) for row in counts["train"] + counts["test"])
    if not labelled or server_test.boxes is not None:
        return {}
    train, test = np.array(counts["train"]), np.array(counts["test"])
    held = test.sum(1) > 0
    rows = np.arange(len(test))
    own = test[rows, train.argmax(1)][held] / test.sum(1)[held]
    server = server_test.labels
    accuracy = {}
    if held.any():
        accuracy["personalised"] = float(own.mean())
    if len(server):
        tested = np.isin(np.arange(train.shape[1]), server)
        accuracy["global"] = float((server == int(np.where(tested, train.sum(0), -1).argmax())).double().mean())
    return accuracy


def versions() -> dict[str, str]:
    """What a result depends on: the package, its number crunchers, Python."""
    return {
        "fewbytes": VERSION,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
