"""What a run is besides its method and task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from msgspec import Meta

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import Count, Whole
from fewbytes.base.rate import Rate, Way
from fewbytes.base.settings import Group, Text, reads_text, setting
from fewbytes.base.units import parse_bytes
from fewbytes.core.promise import Privacy
from fewbytes.core.rules import Rule
from fewbytes.core.speeds import Speeds
from fewbytes.core.uplink import LEAST, MOST, Uplink, UplinkBits
from fewbytes.running.stopping import StopWhen
from fewbytes.running.watcher import Watcher, together

ROUNDING: dict[Way, tuple[str, ...]] = {"uplink": ("uplink_bits", "uplink_step"), "downlink": ("downlink_bits",)}
"""The settings by which what travels is rounded."""
Size = Annotated[int, Meta(ge=1), Text("an amount of data", parse_bytes, int, kinds=str | float)]
BitsAValue = Annotated[float, Meta(ge=LEAST, le=MOST)]
Steps = Annotated[float, Meta(gt=0, le=8)]  # of coarser ones nearly all values are 0


@reads_text
@dataclass(frozen=True, kw_only=True)
class Settings(Group):
    """What a run is besides its method and task, whichever engine it runs on. Raises UserError for what cannot be."""

    title: ClassVar[str] = "Run"
    given: ClassVar[str] = "fb.run(…, {})"

    rounds: Count = setting(20, "Number of rounds.", resumable=True)
    budget: Size | None = setting(
        None, "Most bytes all clients may send in a run, e.g. 200MB; it then ends early.", metavar="SIZE", brief=True
    )
    stop_when: StopWhen | None = setting(
        None, "End the run when a score is reached, as global>=0.9 or f1/personalised>=0.8, or none was better for "
        "so many scored rounds: patience=5.", metavar="CONDITION", brief=True,
    )  # fmt: skip
    aggregate: Rule = setting(
        Rule(), "What the server takes of clients' replies: mean, or, where some may lie, median, trimmed-mean=PART, "
        "krum=LIARS, multi-krum=LIARS, norm-clip, norm-clip=NORM or geometric-median.", metavar="RULE",
        brief=True,
    )  # fmt: skip
    dp: Privacy | None = setting(
        None, "Promise differential privacy, epsilon=8,delta=1e-5,clip=1.0: of clients, kept by the server, or with "
        "of=samples of each one's samples, kept by the clients.", metavar="TERMS", brief=True,
    )  # fmt: skip
    uplink_bits: UplinkBits | None = setting(
        None, "Round what clients send to about so many bits a value, 0.3 to 8, or to what moves while they train, by "
        "auto=1MB/s; what that loses is added to what they send next.", metavar="BITS", resumable=True, brief=True,
    )  # fmt: skip
    uplink_step: Steps | None = setting(
        None, "Or to steps of so many root mean squares of it, at most 8.", resumable=True, brief=True
    )
    downlink_bits: BitsAValue | None = setting(
        None, "Round what the server sends to about so many bits a value, 0.3 to 8, of the difference from what "
        "clients have; what that loses is in what it sends next.", metavar="BITS", resumable=True, brief=True,
    )  # fmt: skip
    speeds: Speeds | None = setting(
        None, "Simulated seconds that each client takes for an exchange: 1,1,10, a file with one a line, or 10x, from "
        "1 to 10, dealt out at random.", metavar="TABLE", brief=True,
    )  # fmt: skip
    engine: Literal["local", "flower-simulation", "flower-deployment"] = setting(
        "local", "local, or flower-simulation (Ray); plan: or flower-deployment.", metavar="NAME"
    )
    workers: Count | None = setting(None, "Worker processes (default: one per core).", resumable=True)
    ray_address: str | None = setting(
        None, "With flower-simulation: the Ray cluster to run on, host:port of its head, or auto; or local, this host "
        "alone (the default).", metavar="ADDRESS", resumable=True,
    )  # fmt: skip
    evaluate_every: Count = setting(1, "Score the models every so many rounds.")
    coded: bool = setting(True, "Lossless coding of what travels.", key="coding", option="--coding/--no-coding")
    keep_frames: bool = setting(False, "Keep every frame as a file, for `fewbytes inspect`.", option="--keep-frames")
    keep_checkpoints: Count = setting(
        2, "Rounds that can be gone back to (--from-round): the last so many.", resumable=True, brief=True
    )
    save_models: bool = setting(True, "Save the trained models.", option="--models/--no-models")
    out: Path | str | None = None  # the run folder; None: a temporary one that lives as long as the result
    resume: bool = False  # go on from the last checkpoint in it
    from_round: Whole | None = None  # or from the one after this round, and forget those after it
    durable: bool = True  # a loss of power costs one finished round at most; a temporary folder need not be
    config: str | None = None  # text of config.toml; None: the method's parameters
    about: dict[str, Any] = field(default_factory=dict)  # entries for result.json
    watcher: Watcher = field(default_factory=Watcher)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ray_address is not None and self.engine != "flower-simulation":
            raise UserError(f"ray_address is for engine flower-simulation, not {self.engine}")
        if self.resume and self.out is None:
            raise UserError("resume goes on with the run in a folder: say which, out=…")
        if self.from_round is not None and not self.resume:
            raise UserError("from_round goes back in a run that is resumed: say so (resume)")
        if self.uplink_bits is not None and self.uplink_step is not None:
            raise UserError("uplink_bits and uplink_step say the same in two ways: leave one out")
        if self.rounding and not self.coded:
            named = " and ".join(self.rounding)
            raise UserError(f"what is rounded is coded, else it is not smaller: leave out {named}, or coding = false")
        if self.engine != "flower-deployment" and self.uplink_bits == UplinkBits():
            raise UserError("clients here have no links to measure: say what they move, uplink_bits auto=1MB/s")

    @property
    def rounding(self) -> dict[str, Any]:
        """The settings by which what travels is rounded, those that are given."""
        keys = [key for keys in ROUNDING.values() for key in keys]
        return {key: value for key in keys if (value := getattr(self, key)) is not None}

    def uplink(self) -> Uplink:
        """How much is kept of the values that clients send."""
        return Uplink(self.uplink_bits, self.uplink_step or 0.0)

    def downlink(self) -> Rate:
        """How much is kept of the values that the server sends."""
        return Rate(self.downlink_bits or 0.0)

    def check_on_flower(self) -> None:
        """Raises UserError for what cannot be where clients are Flower's nodes."""
        if self.speeds is not None:
            raise UserError("speeds are simulated, and clients on Flower have their own: leave speeds out")

    @classmethod
    def of(cls, values: Mapping[str, Any], belongs: Callable[[str, Any], str] = lambda name, value: "") -> Self:
        """As in `Group`; `watcher` may be what `together` takes. `belongs`: where an argument belongs that a run has
        not, or nothing."""
        for name, value in values.items():
            if name not in cls.__dataclass_fields__ and (place := belongs(name, value)):
                raise UserError(f"a run has no setting {name!r}{place}")
        return super().of({**values, "watcher": together(values["watcher"])} if "watcher" in values else values)
