"""Settings of a run: rounds, limits, rounding, engine, and what its folder keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta

from fewbytes.base.durations import parse_seconds
from fewbytes.base.errors import UserError
from fewbytes.base.ranges import Count, Whole
from fewbytes.base.rate import FEWEST, MOST, Rate, Way
from fewbytes.base.settings import Group, Text, reads_text, setting
from fewbytes.base.units import parse_bytes, plain
from fewbytes.core.links import Links
from fewbytes.core.promise import Privacy
from fewbytes.core.rules import Rule
from fewbytes.core.speeds import Speeds
from fewbytes.core.uplink import RANGE, Uplink, UplinkBits
from fewbytes.running.stopping import StopWhen
from fewbytes.running.watcher import Watcher, together

ROUNDING: dict[Way, tuple[str, ...]] = {"uplink": ("uplink_bits", "uplink_step"), "downlink": ("downlink_bits",)}
"""By direction, the settings that round values before they are sent, besides `bits`, which rounds both."""
USUALLY_KEPT = 2  # checkpoints
LOSSLESS = 32.0  # bits a value of downloads that are not rounded
Size = Annotated[int, Meta(ge=1), Text("an amount of data", parse_bytes, int, kinds=str | float)]


def _bits(given: str | float) -> float:
    """Bits a value. Raises ValueError unless they are a number in RANGE."""
    bits = float(given)
    if not FEWEST <= bits <= MOST:
        raise ValueError(given)
    return bits


def _down_bits(given: str | float) -> float:
    """As `_bits`, or LOSSLESS."""
    return LOSSLESS if float(given) == LOSSLESS else _bits(given)


def _seconds(given: str | float) -> float:
    """A length of time in seconds. Raises ValueError."""
    try:
        return parse_seconds(given)
    except UserError as error:
        raise ValueError(given) from error


def _written(seconds: float) -> str:
    """Seconds as text that `_seconds` reads."""
    return f"{plain(seconds)}s"


BITS = f"a number from {RANGE} (uplink_bits also takes auto=RATE, a client's uplink)"
DOWN = f"{RANGE}, or {LOSSLESS:g}: not at all"
BitsAValue = Annotated[float, Text(BITS, _bits, float, kinds=str | int | float)]
DownBits = Annotated[float, Text(f"a number from {DOWN}", _down_bits, float, kinds=str | int | float)]
Duration = Annotated[
    float,
    Meta(gt=0),
    Text("a length of time from 0.01s to 30d, like 10m", _seconds, _written, str | int | float),
]
Steps = Annotated[float, Meta(gt=0, le=8)]  # coarser steps round nearly all values to 0


@reads_text
@dataclass(frozen=True, kw_only=True)
class Settings(Group):
    """Settings of a run besides its method and task, on any engine. Raises UserError for invalid values."""

    title: ClassVar[str] = "Run"
    given: ClassVar[str] = "fb.run(…, {})"

    rounds: Count = setting(20, "Number of rounds.", resumable=True)
    budget: Size | None = setting(
        None,
        "Maximum upload of all clients together, e.g. 200MB; the run ends before it exceeds that.",
        metavar="SIZE",
        brief=True,
    )
    stop_when: StopWhen | None = setting(
        None, "End the run at a score (global>=0.9, f1/personalised>=0.8), or after a number of scored rounds without "
        "improvement (patience=5; on validation data, see --validation); the best model is kept.",
        metavar="CONDITION", brief=True,
    )  # fmt: skip
    aggregate: Rule = setting(
        Rule(), "Aggregation rule: mean, or against malicious clients median, trimmed-mean=FRACTION, krum=NUMBER, "
        "multi-krum=NUMBER, norm-clip, norm-clip=NORM or geometric-median.", metavar="RULE", brief=True,
    )  # fmt: skip
    dp: Privacy | None = setting(
        None, "Differential privacy, e.g. epsilon=8,delta=1e-5,clip=1: per client, enforced by the server, or with "
        "of=samples per sample, enforced by the clients.", metavar="TERMS", brief=True,
    )  # fmt: skip
    bits: BitsAValue | None = setting(
        None, f"Round uploads and downloads to about this many bits per value, {RANGE} (for auto, see "
        "--uplink-bits); rounding errors are fed back into the next message.", metavar="BITS", resumable=True,
        brief=True,
    )  # fmt: skip
    uplink_bits: UplinkBits | None = setting(
        None, f"Round uploads to about this many bits per value, {RANGE}, or with auto=1MB/s to what the link moves "
        "while clients train; rounding errors are fed back into the next upload.", metavar="BITS", resumable=True,
        brief=True,
    )  # fmt: skip
    uplink_step: Steps | None = setting(
        None,
        "Round uploads to steps of this size, in root mean squares of the values; at most 8.",
        resumable=True,
        brief=True,
    )
    downlink_bits: DownBits | None = setting(
        None, f"Round downloads to about this many bits per value, {DOWN} (default: twice the bits of "
        "uploads). Differences are taken from what clients have, so the rounding error is part of the next download.",
        metavar="BITS", resumable=True, brief=True,
    )  # fmt: skip
    speeds: Speeds | None = setting(
        None, "Simulated seconds per exchange and client: 1,1,10, a file with one number per line, or 10x for random "
        "values from 1 to 10.", metavar="TABLE", brief=True,
    )  # fmt: skip
    links: Links | None = setting(
        None, "Simulated links, repeated over the clients: 10Mbps,1Mbps; 1Mbps-30s/10m fails for 30 s in every 10 "
        "min.", metavar="RATES", brief=True,
    )  # fmt: skip
    round_time: Duration | None = setting(
        None, "Time for a round, e.g. 10m: each client takes as many local steps as fit, by its earlier rounds "
        "(fednova).", metavar="TIME", brief=True,
    )  # fmt: skip
    save_every: Duration | None = setting(
        None, "Save local training this often, e.g. 5m; a killed node or run then continues from there.",
        metavar="TIME", resumable=True, brief=True,
    )  # fmt: skip
    engine: Literal["local", "flower-simulation", "flower-deployment"] = setting(
        "local", "Engine: local, flower-simulation (Ray) or, in plan, flower-deployment.", metavar="NAME"
    )
    workers: Count | None = setting(None, "Number of worker processes (default: one per core).", resumable=True)
    ray_address: str | None = setting(
        None, "With flower-simulation: Ray cluster to run on, as host:port of its head, auto, or local for this host "
        "(default: local).", metavar="ADDRESS", resumable=True,
    )  # fmt: skip
    evaluate_every: Count = setting(1, "Number of rounds between evaluations.")
    coded: bool = setting(True, "Compress messages losslessly.", key="coding", option="--coding/--no-coding")
    keep_frames: bool = setting(False, "Keep every message as a file, for `fewbytes inspect`.", option="--keep-frames")
    keep_checkpoints: Count = setting(
        USUALLY_KEPT,
        "Number of recent rounds whose checkpoints are kept; if more than 2, their models, too, to export.",
        resumable=True,
        brief=True,
    )
    save_models: bool = setting(True, "Save the trained models.", option="--models/--no-models")
    out: Path | str | None = None  # the run folder; None: a temporary one that lives as long as the result
    resume: bool = False  # from the last checkpoint in `out`
    from_round: Whole | None = None  # resume from the checkpoint after this round, and drop later ones
    durable: bool = True  # a power failure costs at most one finished round; unnecessary for temporary folders
    config: str | None = None  # text of config.toml; None: the method's parameters
    about: dict[str, Any] = field(default_factory=dict)  # entries for result.json
    watcher: Watcher = field(default_factory=Watcher)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ray_address is not None and self.engine != "flower-simulation":
            raise UserError(f"ray_address is for engine flower-simulation, not {self.engine}")
        if self.resume and self.out is None:
            raise UserError("resume needs the folder of the run to resume: give out=…")
        if self.from_round is not None and not self.resume:
            raise UserError("from_round needs resume: it goes back to an earlier round of that run")
        if self.uplink_bits is not None and self.uplink_step is not None:
            raise UserError("uplink_bits and uplink_step both set the rounding of uploads: leave one out")
        if self.bits is not None and len(self.rounding) > 1:
            others = " and ".join(key for key in self.rounding if key != "bits")
            raise UserError(f"bits rounds uploads and downloads: leave out {others}, or bits")
        if self.rounding and not self.coded:
            named = " and ".join(self.rounding)
            raise UserError(f"rounding saves bytes only with coding: leave out {named}, or coding = false")
        if self.engine != "flower-deployment" and self.uplink_bits == UplinkBits():
            raise UserError("simulated clients have no link to measure: give its speed, e.g. uplink_bits auto=1MB/s")

    @property
    def rounding(self) -> dict[str, Any]:
        """The given settings that round values before they are sent."""
        keys = ["bits", *(key for keys in ROUNDING.values() for key in keys)]
        return {key: value for key in keys if (value := getattr(self, key)) is not None}

    def uplink(self) -> Uplink:
        """How finely uploads are rounded."""
        bits = self.uplink_bits if self.bits is None else UplinkBits(self.bits)
        return Uplink(bits, self.uplink_step or 0.0)

    def downlink(self) -> Rate:
        """How finely downloads are rounded; by default twice as finely as uploads."""
        bits = self.bits or self.downlink_bits
        if bits is None:
            bits = min(2 * self.uplink_bits.bits, MOST) if self.uplink_bits else 0.0
        return Rate(0.0 if bits == LOSSLESS else bits)

    @property
    def by_uplink(self) -> bool:
        """Whether downloads are rounded only because uploads are."""
        return bool(self.downlink()) and self.bits is None and self.downlink_bits is None

    def check_on_flower(self) -> None:
        """Raises UserError for settings that do not apply where clients are Flower's nodes."""
        if self.speeds is not None:
            raise UserError("speeds simulates slow clients, and Flower's nodes are real: leave speeds out")
        if self.links is not None:
            raise UserError("links simulates links, and those of Flower's nodes are real: leave links out")

    def check_in_process(self) -> None:
        """Raises UserError for settings that do not apply where clients are simulated in this process."""
        if self.round_time is not None and self.speeds is None and self.links is None:
            raise UserError("round_time needs clients that take time: give speeds or links, such as links=10Mbps,1Mbps")

    def check_round_time(self, method: str, normalises: bool, timeout: float) -> None:
        """Raises UserError for a round time that cannot be kept."""
        if not normalises:
            raise UserError(
                f"{method} gives clients that take more local steps more weight, so round_time would bias its model: "
                "use fednova, or leave round_time out"
            )
        if self.engine == "flower-simulation":
            raise UserError("round_time measures clients' machines, and a simulation has one: use engine local")
        if self.speeds is None and self.links is None and (self.round_time or 0) >= timeout:
            raise UserError(f"round_time must be below round_timeout, {timeout:g} s: raise round_timeout")

    @classmethod
    def of(cls, values: Mapping[str, Any], belongs: Callable[[str, Any], str] = lambda name, value: "") -> Self:
        """As in `Group`; `watcher` may be anything `together` takes. `belongs`: a hint where an unknown argument
        belongs, or an empty text."""
        for name, value in values.items():
            if name not in cls.__dataclass_fields__ and (place := belongs(name, value)):
                raise UserError(f"a run has no setting {name!r}{place}")
        return super().of({**values, "watcher": together(values["watcher"])} if "watcher" in values else values)
