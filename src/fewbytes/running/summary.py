"""The content of result.json."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fewbytes.base.files import replacing
from fewbytes.core.ledger import Ledger
from fewbytes.core.method import Method
from fewbytes.core.policy import ABSENT
from fewbytes.core.task import Task
from fewbytes.data.clients import FederatedData
from fewbytes.running.checkpoint import VERSION
from fewbytes.running.guessing import guesses, rarest_class
from fewbytes.running.promises.joiners import refusals
from fewbytes.running.rounding import rounded


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `rounds`: the number of its last round."""

    status: str
    rounds: int
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

    `counts`: the content of partition.json. `about`: further entries. `absent`: by client, the number of rounds in
    which its node was absent or could not take part. Scores are of present clients: if all first clients leave, of the
    rounds after that. `score` is of the first metric; `further` of the others.
    """
    metrics = {metric.name: metric for metric in task.problem.objective.metrics}
    left = turnover(task, outcome.rounds)
    since = left if left and any(r["phase"] == "round" and r["round"] >= left for r in rows) else 1
    scored = [r for r in rows if r["phase"] != "join"]
    found = {name: _curves(scored, name, since, metric.higher) for name, metric in metrics.items()}
    first = next(iter(metrics), "")
    scores = found.get(first, {})
    nothing = {"final": None, "best": None, "best_round": None}
    headline = method.promises.headline
    kind = headline if headline in scores else next(iter(scores), headline)
    score = {"metric": first or None, "kind": kind, **scores.get(kind, nothing), "all": scores}
    before = _last(scored, first, since) if since > 1 else {}
    whole = [row for row in rows if row["phase"] == "round"]
    details: dict[str, Any] = next((row["details"] for row in reversed(rows) if "details" in row), {})
    exchanges = max(1, sum(row["cohort"] for row in whole))
    totals = ledger.totals()
    broken = list(dict.fromkeys(name for row in rows for name in row.get("not_finite", [])))
    missing = [left for row in rows for left in row.get("left_out", []) if left["handler"] == ABSENT]
    refused = {left["client"] for left in refusals(rows)}
    absent = Counter(str(left["client"]) for left in missing)
    return {
        "method": method.method_name,
        "parameters": method.parameters,
        **about,
        "clients": len(task.problem.clients),
        "seed": task.problem.seed,
        "device": task.problem.device,
        "precision": task.problem.precision,
        "rounds": len(whole),
        "status": outcome.status,
        "score": score,
        **({"turnover": since, "score_before": before} if since > 1 else {}),
        "metrics": {
            name: {"higher": each.higher, "share": each.share, "percent": each.in_percent}
            for name, each in metrics.items()
        },
        **({"further": further} if (further := {name: of for name, of in found.items() if name != first}) else {}),
        "majority_class_accuracy": majority_class_accuracy(counts, task.data) if first == "accuracy" else {},
        **({"global_model": {"classes": list(task.data.classes), **details}} if details else {}),
        **({"guessing": guessed} if (guessed := guesses(task.problem.objective, counts, task.data)) else {}),
        **({"rarest_class": rarest_class(counts, task.data)} if guessed else {}),
        "test_samples": tested_on(counts, task.data),
        **totals,
        **({"not_finite": broken} if broken else {}),
        "left_out": int((ledger.columns()["outcome"] != 0).sum()) + len(refused) + len(missing),
        **({"absent": dict(absent)} if absent else {}),
        "uplink_bytes_per_client_round": totals["uplink_bytes"] / exchanges,
        "downlink_bytes_per_client_round": totals["downlink_bytes"] / exchanges,
        **rounded(rows),
        "seconds": round(outcome.seconds, 3),
        **({"simulated_seconds": rows[-1]["simulated_seconds"]} if rows and "simulated_seconds" in rows[-1] else {}),
        "peak_memory_bytes": outcome.peak_memory_bytes,
        "versions": versions(),
    }


def write_results(folder: Path, result: dict[str, Any], ledger: Ledger, rows: Sequence[dict[str, Any]]) -> None:
    """Write result.json and ledger.parquet, each at once or not at all. `rows`: the lines of rounds.jsonl, which have
    the times at which rounds ended."""
    with replacing(folder / "result.json") as file:
        file.write(json.dumps(result, indent=2).encode() + b"\n")
    temporary = folder / f".ledger.{os.getpid()}.tmp"
    ledger.write_parquet(temporary, {row["round"]: row["time"] for row in rows if "time" in row})
    os.replace(temporary, folder / "ledger.parquet")


def turnover(task: Task, rounds: int) -> int | None:
    """The first round without any client of round 1; None if there is none."""
    if task.problem.stays:
        return None
    first = set(task.problem.clients_in(1))
    return next((t for t in range(2, rounds + 1) if not first & set(task.problem.clients_in(t))), None)


def _curves(rows: Sequence[dict[str, Any]], metric: str, since: int, higher: bool) -> dict[str, dict[str, Any]]:
    """A metric's last and best values since a round, and the best round, by kind of score."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for kind, value in row["scores"].get(metric, {}).items():
            if row["round"] >= since:
                curves.setdefault(kind, []).append((row["round"], value))
    best = {kind: (max if higher else min)(curve, key=lambda point: point[1]) for kind, curve in curves.items()}
    return {
        kind: {"final": curve[-1][1], "best": best[kind][1], "best_round": best[kind][0]}
        for kind, curve in curves.items()
    }


def _last(rows: Sequence[dict[str, Any]], metric: str, before: int) -> dict[str, float]:
    """A metric's last value before a round, by kind of score."""
    last: dict[str, float] = {}
    for row in rows:
        last |= row["scores"].get(metric, {}) if row["round"] < before else {}
    return last


def majority_class_accuracy(counts: dict[str, Any], data: FederatedData) -> dict[str, float]:
    """The accuracy of always predicting the most frequent training class: `global` on the server's test set (of the
    classes in it), `personalised` with each client's own class on its test split, averaged over clients. Empty if the
    task is not classification, or a node does not report its labels."""
    labelled = all(isinstance(row, list) for row in counts["train"] + counts["test"])
    if not labelled or data.learns != "classes":
        return {}
    train, test = np.array(counts["train"]), np.array(counts["test"])
    has_tests = test.sum(1) > 0
    rows = np.arange(len(test))
    own = test[rows, train.argmax(1)][has_tests] / test.sum(1)[has_tests]
    server = data.test.labels
    accuracy = {}
    if has_tests.any():
        accuracy["personalised"] = float(own.mean())
    if len(server):
        tested = np.isin(np.arange(train.shape[1]), server)
        accuracy["global"] = float((server == int(np.where(tested, train.sum(0), -1).argmax())).double().mean())
    return accuracy


def tested_on(counts: dict[str, Any], data: FederatedData) -> dict[str, int]:
    """The number of test samples: `global` the server's, `personalised` those of all clients together. No entry where
    there are none, or a node does not report them."""
    own = [sum(row) if isinstance(row, list) else row for row in counts["test"]]
    found = {"personalised": 0 if None in own else sum(own), "global": len(data.test)}
    return {kind: samples for kind, samples in found.items() if samples}


def versions() -> dict[str, str]:
    """The versions that results depend on: of this package, torch, numpy and Python."""
    return {
        "fewbytes": VERSION,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
