"""Who is named of clients that lie and of clients that are honest, and what looking at every update costs."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

from figures import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from hostile import Scaled

import fewbytes as fb
from fewbytes.core.standing import Updates
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.models import build_model

TERMS: dict[str, Any] = {"epochs": 2, "lr": 0.1, "batch": 20}
METHODS = (fb.FedAvg(**TERMS), fb.FedPURIN(**TERMS), fb.FedPer(**TERMS), fb.SCAFFOLD(**TERMS))
ALPHAS = (0.1, 0.3, 1.0)


class Quiet(fb.Watcher):
    """Hears that somebody stands out."""

    def note(self, text: str) -> None:
        """Nothing."""


def run(method: fb.Method, alpha: float, seed: int, rounds: int = 12, model: str = "mlp") -> fb.Result:
    """A run of ten clients on digits."""
    data = load_dataset("digits")
    dealt = federate(data, Partition("dirichlet", clients=10, alpha=alpha), seed=seed)
    task = fb.Task.on(dealt, lambda: build_model(model, data.train.shape, len(data.classes)), seed=seed)
    how = {"evaluate_every": rounds, "workers": 1, "save_models": False, "watcher": Quiet()}
    return fb.run(method, task, rounds=rounds, **how)


def named(count: int) -> list[Figure]:
    """Row 30: so many honest runs of different clients in which somebody is named; and malicious that are."""
    alarms = 0
    for n in range(count):
        alarms += "stands_out" in run(METHODS[n % len(METHODS)], ALPHAS[n // len(METHODS) % 3], n).summary
    what = (
        f"of {count} honest runs of different clients (alpha 0.1 to 1, four methods), runs in which a client is named"
    )
    found = [Figure(what, str(alarms), "1 of 20", alarms * 20 <= count)]
    one, three = (3,), (3, 5, 7)
    for factor, malicious, wanted in ((-1.0, one, True), (30.0, one, True), (30.0, three, True), (-1.0, three, False)):
        told = run(Scaled(**TERMS, factor=factor, malicious=malicious), 1.0, 1).summary.get("stands_out", {})
        who = len(told.keys() & {str(i) for i in malicious})
        figure = f"{who} of {len(malicious)} named, and {len(told) - who} honest ones"
        met = who == len(malicious) == len(told) if wanted else None
        what = f"{len(malicious)} of 10 send their update times {factor:g}"
        found.append(Figure(what, figure, "all, and no other client" if wanted else "", met))
    return found


def costs(repeats: int) -> list[Figure]:
    """Row 30: which part of a run looking at the updates takes; the median of so many runs."""
    spent = [0.0]

    def timed(function: Any) -> Any:
        def within(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[0] += time.perf_counter() - started

        return within

    Updates.add, Updates.beside = timed(Updates.add), timed(Updates.beside)  # type: ignore[method-assign]
    found = []
    for model, rounds in (("mlp", 20), ("resnet8:width=8,stem=3x3", 4)):
        parts = []
        for _ in range(repeats):
            spent[0] = 0.0
            rows = run(METHODS[0], 1.0, 1, rounds, model).rounds
            parts.append(spent[0] / sum(row["seconds"] - row["seconds_scoring"] for row in rows))
        part = statistics.median(parts)
        found.append(
            Figure(f"cost of the outlier check, of a run with {model}, ten clients", f"{part:.2%}", "3 %", part < 0.03)
        )
    return found
