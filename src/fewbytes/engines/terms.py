"""The arguments of an engine: a run's terms, and its origin, which is its start or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from fewbytes.base.rate import ALL, Rate
from fewbytes.codec.delta import DeltaStream
from fewbytes.core.links import Link
from fewbytes.core.method import Method
from fewbytes.core.policy import Policy
from fewbytes.core.problem import Id, Problem
from fewbytes.core.round_time import RoundTime
from fewbytes.core.task import Task
from fewbytes.core.uplink import Uplink
from fewbytes.engines.downlink import Acknowledged
from fewbytes.engines.waiting import Waiting


@dataclass(frozen=True)
class Terms:
    """A method on a task, in a run folder. `policy`: how many clients must answer. `coded`: lossless coding of frames.
    `keep_frames`: keep them in the run folder. `uplink`, `downlink`: how finely replies and messages are rounded.
    `downlink_wanted`: whether
    a message that cannot be rounded is an error. `seconds`: simulated seconds per exchange, by client (None: real
    time); `links`: simulated links, by client (empty: transfers take no time); `timed`: whether a user gave either.
    `round_time`: how many local steps clients take. `save_every`: seconds between saves of local training (0: none)."""

    method: Method
    task: Task
    folder: Path
    policy: Policy = field(default_factory=Policy)
    coded: bool = True
    keep_frames: bool = False
    uplink: Uplink = field(default_factory=Uplink)
    downlink: Rate = ALL
    downlink_wanted: bool = True
    seconds: Sequence[float] | None = None
    links: Sequence[Link] = ()
    timed: bool = False
    round_time: RoundTime = field(default_factory=RoundTime)
    save_every: float = 0.0

    @property
    def states(self) -> Path:
        """The folder of client states stored here."""
        return self.folder / "checkpoint" / "clients"

    @property
    def waiting(self) -> Path:
        """The folder of messages that wait for clients' next requests."""
        return self.folder / "checkpoint" / "waiting"


@dataclass
class Work:
    """A client's work for a stream."""

    client: int
    handler: str
    round: int  # in which it was asked; names its randomness
    scored: bool  # whether that round's models are scored
    until: float  # its end in simulated seconds since the run began; 0 in real time
    message: int  # the index of the frame that it was sent


@dataclass
class UnderWay:
    """All work for a stream, in the order asked, as stored in a checkpoint."""

    work: list[Work]
    frames: list[bytes]  # the different messages; empty bytes: nothing was sent


@dataclass
class Origin:
    """The state from which an engine begins: the run's nonce, its number of resumptions (`starts`), client states'
    versions, participating clients (`known`), waiting messages, work for a stream, the simulated clock, delta streams,
    and clients' positions in them."""

    nonce: bytes
    starts: int
    versions: dict[Id, int]
    known: list[Id]
    waiting: list[Waiting]
    under_way: UnderWay
    clock: float
    streams: list[DeltaStream]
    acknowledged: dict[Id, Acknowledged]

    @classmethod
    def start(cls, problem: Problem) -> Self:
        """The start of a new run."""
        return cls(os.urandom(16), 0, {}, problem.clients_in(1), [], UnderWay([], []), 0.0, [], {})

    @property
    def new(self) -> bool:
        """Whether this is the start of a run; a resumed run has a number of resumptions."""
        return self.starts == 0


class Named(NamedTuple):
    """The files that a checkpoint names: client states by version, and waiting messages by number."""

    versions: Mapping[Id, int]
    messages: Collection[int]
