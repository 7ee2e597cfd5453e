"""One run as read from its folder, and the figures of a summary that are computed from it."""

from __future__ import annotations

import math
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from fewbytes.base.units import written
from fewbytes.core.metric_names import CHANCE, traits
from fewbytes.report.records import Attack, Local, Membership, Partition, Poison, Probe, Traits

Row = dict[str, Any]  # a `Round`, with any other fields of its line
Direction = Literal["uplink", "downlink"]
Both = Literal["both"]


class Score(NamedTuple):
    """One kind of score over a run, and the first row with the best; None if never measured."""

    final: float | None
    best: float | None
    best_row: Row | None


class Guess(NamedTuple):
    """The score of guessing, its bound by chance (two standard errors better), both in words, and whether higher is
    better."""

    score: float
    by_chance: float
    words: str
    higher: bool = True

    def beaten(self, score: float) -> bool:
        """Whether a score is better than guessing."""
        return score > self.by_chance + 1e-9 if self.higher else score < self.by_chance - 1e-9


@dataclass(frozen=True)
class RunFolder:
    """One run as read from disk. `label` is the method's name, which `read_runs` makes unique; `failure` is the reason
    of a run that failed."""

    path: Path
    label: str
    rounds: list[Row]
    ledger: pa.Table | None
    partition: Partition | None
    result: dict[str, Any] | None
    config: str
    probe: Probe | None = None
    local: list[Local] | None = None
    attack: Attack | None = None
    membership: Membership | None = None
    poison: Poison | None = None
    failure: str = ""

    def fact(self, key: str) -> Any:
        """A setting of the run from `result.json`, else the top level of `config.toml`, else None."""
        found = (self.result or {}).get(key)
        return tomllib.loads(self.config).get(key) if found is None else found

    @property
    def method(self) -> str:
        """The method's name, else the folder's."""
        method = self.fact("method")
        return method if isinstance(method, str) else self.path.name

    @property
    def budget(self) -> int | None:
        """The run's budget: maximum bytes that all clients together may send; None if it had none."""
        budget = self.fact("budget")
        return budget if isinstance(budget, int) else None

    @property
    def over_budget(self) -> bool:
        """Whether the clients have sent more than the budget."""
        return self.budget is not None and self.total_bytes("uplink") > self.budget

    @property
    def kind(self) -> str | None:
        """The method's main kind of score; without a result, the first measured one."""
        kind = (self.result or {}).get("score", {}).get("kind")
        return kind or next(iter(self.kinds()), None)

    @property
    def metrics(self) -> list[str]:
        """Every metric, the main one first."""
        stated = (self.result or {}).get("metrics", {})
        return list(dict.fromkeys([*stated, *(metric for row in self.rounds for metric in row.get("scores", {}))]))

    @property
    def metric(self) -> str:
        """The run's main metric; accuracy if nothing was measured."""
        return next(iter(self.metrics), "accuracy")

    def higher(self, metric: str | None = None) -> bool:
        """Whether higher values of a metric (default: the run's) are better."""
        return self._traits(metric)["higher"]

    def share(self, metric: str | None = None) -> bool:
        """Whether a metric (default: the run's) is a share, 0..1."""
        return self._traits(metric)["share"]

    def percent(self, metric: str | None = None) -> bool:
        """Whether a metric (default: the run's) is shown in per cent: a share of samples."""
        return self._traits(metric)["share"] and self._traits(metric)["percent"]

    def written(self, value: float | None, metric: str | None = None) -> str:
        """A value of a metric (default: the run's) as text."""
        return written(value, self.percent(metric))

    def _traits(self, metric: str | None) -> Traits:
        metric = self.metric if metric is None else metric
        stated: dict[str, Traits] = (self.result or {}).get("metrics", {})
        known = traits(metric)
        usual: Traits = {"higher": known.higher, "share": known.share, "percent": known.percent}
        return {**usual, **stated[metric]} if metric in stated else usual

    def kinds(self, metric: str | None = None) -> list[str]:
        """Every measured kind of a metric (default: the run's), in the order of first appearance."""
        metric = self.metric if metric is None else metric
        return list(dict.fromkeys(kind for row in self.rounds for kind in row.get("scores", {}).get(metric, {})))

    def curve(self, kind: str | None, metric: str | None = None) -> list[tuple[Row, float]]:
        """The rounds in which one kind of a metric (default: the run's) was measured, each with its value.

        Measurements of a client that joins are not included.
        """
        metric = self.metric if metric is None else metric
        rows = (row for row in self.rounds if row["phase"] != "join")
        found = ((row, row.get("scores", {}).get(metric, {}).get(kind or "")) for row in rows)
        return [(row, value) for row, value in found if value is not None and math.isfinite(value)]

    def score(self, kind: str | None, metric: str | None = None) -> Score:
        """The last and the best value of one kind of a metric (default: the run's); if all first clients left,
        only over the rounds after that."""
        since = (self.result or {}).get("turnover", 1)
        curve = [point for point in self.curve(kind, metric) if point[0]["round"] >= since]
        if not curve:
            return Score(None, None, None)
        row, best = (max if self.higher(metric) else min)(curve, key=lambda point: point[1])
        return Score(curve[-1][1], best, row)

    def guessing(self, kind: str | None) -> Guess | None:
        """The score of guessing for a kind of the run's metric; None if unknown. If the number of samples is unknown,
        chance adds nothing."""
        tested = "global" if kind == "global" else "personalised"  # other kinds use clients' own test data
        result, metric = self.result or {}, self.metric
        majority = result.get("majority_class_accuracy", {}).get(tested) if metric == "accuracy" else None
        guessed: float | None = result.get("guessing", {}).get(metric, {}).get(tested, majority)
        score = CHANCE.get(metric, guessed)
        if score is None:
            return None
        if self.share() and self.higher() and score == 1:
            words = f"always answering one class has {metric} {self.written(score)}: judge by it beside another metric"
            return Guess(score, score, words)
        samples = result.get("rarest_class" if "@" in metric else "test_samples", {}).get(tested)
        error = math.sqrt(score * (1 - score) / samples) if samples and self.share() else 0.0
        how = {"accuracy": "guessing the majority class", "r2": "predicting the mean"}.get(metric, "guessing")
        bound = score + 2 * error if self.higher() else score - 2 * error
        upto = "up" if self.higher() else "down"
        chance = f" ({upto} to {self.written(max(0, bound))} by chance on {samples:,} test samples)" if error else ""
        return Guess(score, bound, f"{how}, {self.written(score)}{chance}", self.higher())

    def total_bytes(self, direction: Direction | Both) -> int:
        """Bytes on the wire over the whole run, of one direction or both: the ledger's sum.

        The rounds' sum if that is larger, or there is no ledger: a killed run has written its last rounds, but not the
        ledger; an interrupted run's ledger includes the bytes of an unfinished round.
        """
        if direction == "both":
            return self.total_bytes("uplink") + self.total_bytes("downlink")
        rounds: int = sum(row[f"{direction}_bytes"] for row in self.rounds)
        return rounds if self.ledger is None else max(rounds, pc.sum(self.ledger[_column(direction)]).as_py() or 0)

    def nominal_bytes(self, direction: Direction) -> int | None:
        """Bytes as papers count them (4 a value, 1/8 a mask entry) over the whole run; None if unknown."""
        counts = [row.get(f"{direction}_nominal_bytes") for row in self.rounds]
        found: int | None = (self.result or {}).get(f"{direction}_nominal_bytes")
        return found if None in counts else max(found or 0, sum(count or 0 for count in counts))

    def bytes_per_client_round(self, direction: Direction) -> float | None:
        """All bytes over the number of times a client took part in a round; None if unknown."""
        cohorts = sum(row.get("cohort", 0) for row in self.rounds if row["phase"] == "round")
        return self.total_bytes(direction) / cohorts if cohorts else None

    @property
    def exchanges(self) -> int | None:
        """The number of requests to clients over the whole run; None without a complete ledger."""
        if self.ledger is None or self.total_bytes("downlink") > (pc.sum(self.ledger["bytes_down"]).as_py() or 0):
            return None
        return int(self.ledger.num_rows)

    def bytes_by_client(self, direction: Direction) -> dict[int, int]:
        """Bytes of every client over the whole run; a client never called has 0. Empty without a ledger."""
        if self.ledger is None:
            return {}
        clients = dict.fromkeys(range(self.clients or 0), 0)
        sums = self.ledger.group_by("client").aggregate([(_column(direction), "sum")])
        clients.update(zip(sums["client"].to_pylist(), sums[f"{_column(direction)}_sum"].to_pylist(), strict=True))
        return dict(sorted(clients.items()))

    @property
    def clients(self) -> int | None:
        """The run's number of clients; None if unknown."""
        if self.partition is not None:
            return len(self.partition["train"])
        return (self.result or {}).get("clients")

    @property
    def seconds(self) -> float:
        """Seconds of the run, including start and finish, or of its rounds if these are longer."""
        stated: float = (self.result or {}).get("seconds", 0.0)
        return max(stated, float(sum(row.get("seconds", 0.0) for row in self.rounds)))

    @property
    def timed(self) -> bool:
        """Whether clients' speeds were simulated, and every line has the time of the simulated clock."""
        return bool(self.rounds) and all("simulated_seconds" in row for row in self.rounds)

    @property
    def status(self) -> str:
        """`done`, `running`, `interrupted`; without a result `failed`, or `unfinished` if it has left no reason."""
        without = "failed" if self.failure else "unfinished"
        return without if self.result is None else self.result.get("status", "done")


def when(row: Row) -> str:
    """The time of a line of rounds.jsonl, in words."""
    words = {"start": "before round 1", "join": f"before round {row['round']}", "finish": "after the last round"}
    return words.get(row["phase"], f"round {row['round']}")


def distinctly_labelled(runs: Sequence[RunFolder], without: Sequence[str] = ()) -> list[str]:
    """A label for each run: the method's name, and the settings that distinguish it from others (not `without`), else
    the folder's name."""
    alike: dict[str, list[RunFolder]] = defaultdict(list)
    for run in runs:
        alike[run.method].append(run)
    labels: dict[Path, str] = {}
    for label, group in alike.items():
        settings = [settings_of(run) for run in group]
        named = dict.fromkeys(key for each in settings for key in each if key not in without)
        keys = [key for key in named if len({repr(each.get(key)) for each in settings}) > 1]
        names = [f"{label} ({', '.join(f'{key}={each.get(key)}' for key in keys)})" for each in settings]
        if len(set(names)) < len(group):
            names = [f"{label} ({run.path.name})" for run in group]
        if len(set(names)) < len(group):
            names = [f"{label} ({run.path})" for run in group]
        labels |= {run.path: name if len(group) > 1 else label for run, name in zip(group, names, strict=True)}
    return [labels[run.path] for run in runs]


def settings_of(run: RunFolder) -> dict[str, Any]:
    """Every setting of a run by name, the method's own parameters among them."""
    config, result = tomllib.loads(run.config), run.result or {}
    stated = {key: result[key] for key in ("dataset", "model", "clients", "seed") if key in result}
    parameters: dict[str, Any] = config.pop("parameters", {}) | result.get("parameters", {})
    return config | stated | parameters


def _column(direction: Direction) -> str:
    return "bytes_up" if direction == "uplink" else "bytes_down"
