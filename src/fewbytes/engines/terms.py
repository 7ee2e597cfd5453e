"""What an engine takes of a run, and where in it the run begins: its start, or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from fewbytes.base.rate import ALL, Rate
from fewbytes.core.method import Method
from fewbytes.core.policy import Policy
from fewbytes.core.problem import Id, Problem
from fewbytes.core.task import Task
from fewbytes.core.uplink import Uplink
from fewbytes.engines.downlink import Acknowledged, DeltaStream
from fewbytes.engines.waiting import Waiting


@dataclass(frozen=True)
class Terms:
    """A method on a task, in a run folder. `policy`: how many must answer. `coded`: lossless coding of the frames.
    `keep_frames`: in a folder of the run. `uplink`, `downlink`: how much is kept of the values in replies, and in
    messages. `seconds`: simulated, that each client takes for an exchange (None: real ones)."""

    method: Method
    task: Task
    folder: Path
    policy: Policy = field(default_factory=Policy)
    coded: bool = True
    keep_frames: bool = False
    uplink: Uplink = field(default_factory=Uplink)
    downlink: Rate = ALL
    seconds: Sequence[float] | None = None

    @property
    def states(self) -> Path:
        """The folder of client states, of those that lie here."""
        return self.folder / "checkpoint" / "clients"

    @property
    def waiting(self) -> Path:
        """The folder of messages that wait for clients' next requests."""
        return self.folder / "checkpoint" / "waiting"


@dataclass
class Work:
    """What a client is at work on, and since which round."""

    client: int
    handler: str
    round: int  # in which it was asked; names its randomness
    scored: bool  # whether that round's models are scored
    until: float  # simulated seconds since the run began; 0 where none are
    message: int  # which of the frames it was sent


@dataclass
class UnderWay:
    """All who are at work, in the order asked, as a checkpoint holds them."""

    work: list[Work]
    frames: list[bytes]  # their messages, each once; empty: nothing was sent


@dataclass
class Origin:
    """Where a run begins: client states' versions, and the clients that take part; the run's nonce, and how often it
    has been resumed; messages that wait; who is at work, and the simulated time; what rounded messages were last, and
    which of them clients hold."""

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
        """The start of a run, which has yet to find its clients."""
        return cls(os.urandom(16), 0, {}, problem.clients_in(1), [], UnderWay([], []), 0.0, [], {})

    @property
    def new(self) -> bool:
        """Whether it is a run's start; a run is resumed with a number."""
        return self.starts == 0


class Named(NamedTuple):
    """The files that a checkpoint names: client states, by their versions, and messages that wait, by number."""

    versions: Mapping[Id, int]
    messages: Collection[int]
