"""The figures that a cell can show of a run: each kind is a class, named by `show` in a table's file."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal

import msgspec
from safetensors import safe_open

from fewbytes.analysis.local import local_accuracies
from fewbytes.analysis.probe import probe
from fewbytes.analysis.settings import Probing
from fewbytes.report.folder import Direction, RunFolder
from fewbytes.report.records import Probed

MB = 2**20  # bytes, as papers count


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="show"):
    """A figure in its table's unit. `curve`: the kind of accuracy whose curve the report draws (None: no curve)."""

    chance: ClassVar[bool] = True  # whether it depends on the seed; sizes do not

    curve: str | None = None

    @abstractmethod
    def __call__(self, run: RunFolder) -> float | None:
        """The figure of a run; None if the run has not got that far."""

    def measure(self, run: Path, tell: Callable[[str], None]) -> None:
        """Add missing files that the figure needs to the folder of a finished run; `tell` is called with progress. Most
        figures need none."""


class Best(Figure, frozen=True, tag="best"):
    """The best accuracy of one kind over the rounds, in per cent, as most papers report.

    `pooled`: over all clients' samples together, not the mean over clients.
    """

    accuracy: str
    pooled: bool = False

    def __call__(self, run: RunFolder) -> float | None:
        """None if that kind was never measured."""
        if not self.pooled:
            return _percent(run.score(self.accuracy).best)
        pooled = [row.get("pooled", {}).get(run.metric, {}).get(self.accuracy) for row in run.rounds]
        return _percent(max((value for value in pooled if value is not None), default=None))


class Final(Figure, frozen=True, tag="final"):
    """The accuracy of one kind after the last round, in per cent."""

    accuracy: str

    def __call__(self, run: RunFolder) -> float | None:
        """None if that kind was never measured."""
        return _percent(run.score(self.accuracy).final)


class Mean(Figure, frozen=True, tag="mean"):
    """The mean accuracy of one kind over the `first` or the `last` rounds, before newcomers joined or after, in per
    cent."""

    accuracy: str
    first: int = 0
    last: int = 0
    who: Literal["known", "newcomers"] = "known"

    def __post_init__(self) -> None:
        """Raises ValueError unless one of the two is given."""
        if bool(self.first) == bool(self.last):
            raise ValueError("a mean is over the first or the last rounds: give one of them")

    def __call__(self, run: RunFolder) -> float | None:
        """None before a round of those clients was scored."""
        arrival, late = run.fact("arrival") or math.inf, self.who == "newcomers"
        curve = [value for row, value in run.curve(self.accuracy) if (row["round"] >= arrival) == late]
        return 100 * fmean(curve[: self.first] if self.first else curve[-self.last :]) if curve else None


class Traffic(Figure, frozen=True, tag="traffic"):
    """The mean traffic per round first..last of a client, or of all clients together.

    `count`: as in papers, 4 bytes per value and 1 bit per mask entry, or only values, in MB of 2^20 bytes; or as sent,
    in MB of 10^6 bytes (`unit`: other bytes per unit). `late`: rounds by which downloads follow their own round;
    a download after the last round counts as one more round. `summed`: the sum over rounds, not the mean.
    """

    chance: ClassVar[bool] = False
    way: Direction
    first: int = 1
    last: int | None = None
    late: int = 0
    count: Literal["nominal", "value", "sent"] = "nominal"
    clients: Literal["each", "all"] = "each"
    summed: bool = False
    unit: float | None = None

    def __call__(self, run: RunFolder) -> float | None:
        """None before the first of those rounds, or if no client took part in them."""
        key = f"{self.way}_bytes" if self.count == "sent" else f"{self.way}_{self.count}_bytes"
        phases, late = (("round", "finish"), self.late) if self.way == "downlink" else (("round",), 0)
        first, last = self.first + late, math.inf if self.last is None else self.last + late
        rows = [row for row in run.rounds if row["phase"] in phases and first <= row["round"] <= last]
        if self.summed:
            shares = min(1, len(rows))
        else:
            shares = sum(row["cohort"] for row in rows) if self.clients == "each" else len(rows)
        unit = self.unit or (1e6 if self.count == "sent" else MB)
        return sum(row[key] for row in rows) / shares / unit if shares else None


class Total(Figure, frozen=True, tag="total"):
    """The traffic of all clients over the whole run, in MB of 2^20 bytes as papers count, or of 10^6 as sent."""

    chance: ClassVar[bool] = False
    way: Direction
    count: Literal["nominal", "sent"] = "nominal"

    def __call__(self, run: RunFolder) -> float | None:
        """None if a run of an older version has no nominal count."""
        if self.count == "sent":
            return run.total_bytes(self.way) / 1e6
        total = run.nominal_bytes(self.way)
        return None if total is None else total / MB


class Stored(Figure, frozen=True, tag="stored"):
    """The size of the run's global model in MB of 2^20 bytes, four bytes per number, with or without buffers."""

    chance: ClassVar[bool] = False
    buffers: bool = True

    def __call__(self, run: RunFolder) -> float | None:
        """None if the run saved no global model."""
        path = run.path / "models" / "global.safetensors"
        if not path.exists():
            return None
        with safe_open(path, "pt") as file:
            sizes: dict[str, int] = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        left_out = () if self.buffers else ("running_mean", "running_var", "num_batches_tracked")
        return sum(n for name, n in sizes.items() if not name.endswith(left_out)) * 4 / MB


class Locals(Figure, frozen=True, tag="local"):
    """The accuracy of one client's own model, or its member of an ensemble, in per cent, on its training samples
    (`own`) or the server's test set (`test`). The run must have saved its models."""

    client: int
    samples: Literal["own", "test"]

    def __call__(self, run: RunFolder) -> float | None:
        """None before it was measured."""
        found = next((each for each in run.local or () if each["client"] == self.client), None)
        return None if found is None else _percent(found[self.samples])

    def measure(self, run: Path, tell: Callable[[str], None]) -> None:
        """Measures the models of all clients."""
        if not (run / "local.json").exists():
            tell(f"measuring the local models of {run}")
            local_accuracies(run)


class Probes(Figure, frozen=True, tag="probe"):
    """The result of a probe after the unit `point` of a network, in hundredths of a nat, or of the samples (`what`).

    The network is the run's global one or, for an ensemble, that of `client`; the run must have saved it. `points`: all
    points probed in this network; `epochs`, `linear_epochs`, `samples`: as in `fewbytes probe`.
    """

    point: str
    what: Probed
    points: tuple[str, ...]
    epochs: int
    linear_epochs: int
    samples: int | None = None
    client: int | None = None

    def __call__(self, run: RunFolder) -> float | None:
        """None if it was not measured yet, or cannot be."""
        points = [] if run.probe is None else run.probe["points"]
        found = next((each for each in points if each["point"] == self.point), None)
        return None if found is None else _percent(found[self.what])

    def measure(self, run: Path, tell: Callable[[str], None]) -> None:
        """Measures all `points`, also if the run has a probe with other settings."""
        file = run / "probe.json"
        there = json.loads(file.read_bytes()) if file.exists() else {"points": []}
        wanted = {
            "model": "global" if self.client is None else f"client {self.client}",
            "epochs": self.epochs,
            "linear_epochs": self.linear_epochs,
        }
        if not wanted.items() <= there.items() or not {*self.points} <= {each["point"] for each in there["points"]}:
            tell(f"probing {run}")
            how = Probing(epochs=self.epochs, linear_epochs=self.linear_epochs, samples=self.samples)
            probe(run, self.client, self.points, how)


def make_figure(fields: dict[str, Any]) -> Figure:
    """The figure that a table's file describes. Raises msgspec.ValidationError."""
    figure: Figure = msgspec.convert(fields, Best | Final | Mean | Traffic | Total | Stored | Locals | Probes)
    return figure


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
