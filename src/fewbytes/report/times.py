"""Time over a stated link: how long finished runs would have taken over it, and when they reached a target score."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from typing import NamedTuple, Self

import pyarrow as pa

from fewbytes.base.errors import UserError
from fewbytes.core.links import Links
from fewbytes.report.folder import RunFolder
from fewbytes.running.stopping import StopWhen


@dataclass(frozen=True)
class Goal:
    """What is asked of finished runs: the clients' links up and down, and a target score; None: not asked.

    The target is of each run's main metric and kind, unless it names them. `text`: the link as given.
    """

    up: Links | None = None
    down: Links | None = None
    target: float | None = None
    named: StopWhen | None = None
    text: str = ""

    @classmethod
    def read(cls, link: str | None = None, downlink: str | None = None, target: str | None = None) -> Self:
        """`link`: as `--links`; `downlink`: where that differs. `target`: `0.9`, `90%`, `global>=0.9`.

        Raises UserError for anything else.

        >>> from fewbytes.report.times import Goal
        >>> goal = Goal.read("2Mbit/s", "10Mbit/s", "90%")
        >>> goal.text, goal.target
        ('2Mbit/s up, 10Mbit/s down', 0.9)
        """
        if downlink is not None and link is None:
            raise UserError("--downlink is the other half of a link: add --link RATE for uploads")
        up = None if link is None else _links("--link", link)
        down = up if downlink is None else _links("--downlink", downlink)
        text = "" if link is None else link if downlink is None else f"{link} up, {downlink} down"
        return cls(up, down, *_target(target), text)

    def wanted(self, run: RunFolder) -> tuple[str | None, str]:
        """The kind and the metric of the target for a run."""
        if self.named is None:
            return run.kind, run.metric
        return self.named.kind, self.named.metric or run.metric

    def met(self, run: RunFolder, value: float) -> bool:
        """Whether a score of a run is as good as the target."""
        assert self.target is not None
        higher = run.higher() if self.named is None else self.named.at_least
        return value >= self.target if higher else value <= self.target

    def target_words(self, run: RunFolder) -> str:
        """The target in words."""
        higher = run.higher() if self.named is None else self.named.at_least
        metric = self.wanted(run)[1]
        return f"{metric} of {run.written(self.target, metric)} or {'more' if higher else 'less'}"


def _links(option: str, text: str) -> Links:
    try:
        return Links.read(text)
    except UserError as error:
        raise UserError(f"{option}: {error}") from None


def _target(text: str | None) -> tuple[float | None, StopWhen | None]:
    if text is None:
        return None, None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if math.isfinite(value):
            return value, None
    except ValueError:
        try:
            if not (named := StopWhen.read(text)).patience:
                return named.value, named
        except UserError:
            pass
    raise UserError(
        f"--reach takes a score, like 0.9, or names its kind, like global>=0.9 or f1/personalised>=0.8, not {text!r}"
    )


def seconds_so_far(run: RunFolder, goal: Goal) -> list[float]:
    """Seconds since the run began at the end of each line of rounds.jsonl, over the links of the goal.

    A step takes the time of its training, measured, or simulated where clients' speeds were (`--speeds`), and that of
    the slowest client's link for the bytes of its requests and replies, as on the simulated clock. Runs with simulated
    links of their own (`--links`; of runs in Python that is not known), which that clock includes, keep its time.
    """
    moving = {} if own_links(run) else _moving(run, goal)
    now, clock, ends = 0.0, 0.0, []
    for row in run.rounds:
        if run.timed:
            trained, clock = row["simulated_seconds"] - clock, row["simulated_seconds"]
        else:
            trained = row.get("seconds", 0.0) - row.get("seconds_scoring", 0.0)
        now += max(0.0, trained) + moving.pop(row["round"], 0.0)  # a round's joiners come in an earlier line of it
        ends.append(now)
    return ends


def own_links(run: RunFolder) -> bool:
    """Whether a run's simulated clock includes links, or may: config.toml does not state what a run in Python had."""
    config = tomllib.loads(run.config)
    return run.timed and ("links" in config or "speeds" not in config)


def _moving(run: RunFolder, goal: Goal) -> dict[int, float]:
    """For each round, the seconds of its slowest client's link. Without a ledger, all clients of a round are taken to
    have moved the same."""
    if goal.up is None or goal.down is None:
        return {}
    slowest: dict[int, float] = {}
    if run.ledger is None:
        for row in run.rounds:
            clients = max(1, row.get("cohort", 1))
            up, down = (max(way.each, key=lambda each: each.seconds(1)) for way in (goal.up, goal.down))
            slowest[row["round"]] = slowest.get(row["round"], 0.0) + (
                up.seconds(row["uplink_bytes"] / clients) + down.seconds(row["downlink_bytes"] / clients)
            )
        return slowest
    sums: pa.Table = run.ledger.group_by(["round", "client"]).aggregate([("bytes_up", "sum"), ("bytes_down", "sum")])
    most = max(sums["client"].to_pylist(), default=-1) + 1
    ups, downs = goal.up.of(most), goal.down.of(most)
    names = ("round", "client", "bytes_up_sum", "bytes_down_sum")
    for t, client, sent, received in zip(*(sums[name].to_pylist() for name in names), strict=True):
        seconds = ups[client].seconds(sent) + downs[client].seconds(received)
        slowest[t] = max(slowest.get(t, 0.0), seconds)
    return slowest


class Reached(NamedTuple):
    """When a run reached the target: the round, bytes of all clients up and down until its end, and seconds over the
    link (None: no link is stated)."""

    round: int
    up: int
    down: int
    seconds: float | None


def reached(run: RunFolder, goal: Goal) -> Reached | None:
    """When a run first reached the target of a goal; None: never."""
    kind, metric = goal.wanted(run)
    up = down = 0
    ends = seconds_so_far(run, goal)
    scores = {id(row): value for row, value in run.curve(kind, metric)}
    for row, end in zip(run.rounds, ends, strict=True):
        up, down = up + row["uplink_bytes"], down + row["downlink_bytes"]
        if id(row) in scores and goal.met(run, scores[id(row)]):
            return Reached(row["round"], up, down, None if goal.up is None and not run.timed else end)
    return None
