"""What a run is besides its method and task, and whom it reports to."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import Count
from fewbytes.base.settings import Group, Text, setting
from fewbytes.base.units import parse_bytes

if TYPE_CHECKING:
    from fewbytes.core.problem import Id


class Watcher:
    """What a run reports while it goes on; override what you want to hear."""

    _warned = False

    def started(self, folder: Path, rounds: int, done: int) -> None:
        """The run begins, `done` rounds of `rounds` already behind it."""

    def waiting(self, there: int, wanted: int) -> None:
        """The run waits for `wanted` clients to connect; `there` have."""

    def replied(self, client: Id) -> None:
        """A client's exchange has ended."""

    def joined(self, client: Id) -> None:
        """A client the run did not know has been served."""

    def refused(self, client: Id, why: str) -> None:
        """A client the run did not know cannot be served; the run goes on without it."""

    def moved(self, uplink_bytes: int, downlink_bytes: int) -> None:
        """Bytes that the whole run has moved so far: reported when it begins, and after each of its steps."""

    def scored(self, row: dict[str, Any]) -> None:
        """A line of rounds.jsonl has been written: of a round, or of what came after the last (`row["phase"]`).

        Unless overridden, warns of the first that was not finite.
        """
        if row.get("not_finite") and not self._warned:
            self._warned = True
            rejected = [left for left in row.get("left_out", []) if left["outcome"] == "rejected"]
            why = "; ".join(f"client {left['client']} rejected: {left['why']}" for left in rejected)
            names = ", ".join(row["not_finite"])
            text = f"round {row['round']}: {names} not finite: {why or 'is lr too high?'}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def stopped(self, t: int) -> None:
        """Round t was the last: another would exceed the budget."""


@dataclass(frozen=True, kw_only=True)
class Settings(Group):
    """What a run is besides its method and task, whichever engine it runs on. Raises UserError for what cannot be."""

    title: ClassVar[str] = "Run"

    rounds: Count = setting(20, "Number of rounds.", resumable=True)
    budget: Count | None = setting(
        None, "Most bytes all clients may send in a run, e.g. 200MB; it then ends early.", metavar="SIZE",
        text=Text("an amount of data", parse_bytes, int, kinds=str | float), brief=True,
    )  # fmt: skip
    engine: Literal["local", "flower-simulation", "flower-deployment"] = setting(
        "local", "local, or flower-simulation (Ray); plan: or flower-deployment.", metavar="NAME"
    )
    workers: Count | None = setting(None, "Worker processes (default: one per core).", resumable=True)
    evaluate_every: Count = setting(1, "Score the models every so many rounds.")
    coded: bool = setting(True, "Lossless coding of what travels.", key="coding", option="--coding/--no-coding")
    keep_frames: bool = setting(False, "Keep every frame as a file, for `fewbytes inspect`.", option="--keep-frames")
    save_models: bool = setting(True, "Save the trained models.", option="--models/--no-models")
    out: Path | str | None = None  # the run folder; None: a temporary one that lives as long as the result
    resume: bool = False  # go on from the checkpoint in it
    config: str | None = None  # text of config.toml; None: the method's parameters
    about: dict[str, Any] = field(default_factory=dict)  # entries for result.json
    watcher: Watcher = field(default_factory=Watcher)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resume and self.out is None:
            raise UserError("resume goes on with the run in a folder: say which, out=…")
