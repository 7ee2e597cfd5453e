"""What an engine adds: how jobs get to clients and answers back, and what there is to know of the clients."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fewbytes.core.ledger import LeftOut
from fewbytes.core.problem import Id
from fewbytes.engines.handlers import Done, Job
from fewbytes.wire import Frame


class Answer(NamedTuple):
    """What came of a job: `outcome` is one of `fewbytes.core.ledger.OUTCOMES`, `why` says in words what was wrong;
    `frame` is the reply's, valid until the job is ended. `different`: its node runs something else than the server.
    `moving`: seconds that frames moved, if that is known."""

    outcome: str
    why: str = ""
    done: Done = Done(0)
    frame: memoryview = memoryview(b"")
    different: bool = False
    moving: float | None = None


class Transport(ABC):
    """Carries jobs to clients, and answers back."""

    ahead: int = 1
    """How many jobs it is given before the first of them is needed."""

    def reaches(self, client: Id) -> bool:
        """Whether anything can be sent to the client."""
        return True

    def put(self, frame: Frame) -> str:
        """Store a message's frame where its readers find it; empty if it travels with the job."""
        return ""

    def free(self, at: str) -> None:
        """Nobody reads what `put` stored there any more."""

    @abstractmethod
    def submit(self, job: Job, frames: Sequence[bytes], call: int) -> bool:
        """Send a job, with the frames that travel with it; whether it could be. `call`: which of the step's calls it
        is of (0: of a stream)."""

    @abstractmethod
    def poll(self, jobs: Sequence[Job], most: int) -> Mapping[int, Answer]:
        """What has come of these jobs, by number, not before something has or some time has passed; of what has to be
        fetched at most so many answers at once."""

    @abstractmethod
    def end(self, jobs: Sequence[Job]) -> None:
        """The answers to these have been read, or are not waited for any more: then they are of no effect."""

    def processes(self) -> list[int]:
        """The processes of this machine that it needs, this one among them."""
        return [os.getpid()]


class Sites(ABC):
    """What an engine knows of the places where its clients are."""

    def called(self, client: Id) -> str:
        """A client as people know it."""
        return f"client {client}"

    def arrivals(self, due: Sequence[Id]) -> tuple[list[Id], list[LeftOut]]:
        """Of clients that are due, and not known to the run yet, those that can take part, and why others cannot."""
        return list(due), []

    def patient(self, tries: int) -> bool:
        """Wait before a round that too few answered is tried again, the `tries`-th time; False: that will not help."""
        return False

    @abstractmethod
    def places(self, before: Mapping[Id, int]) -> list[Path]:
        """What must be on this machine's disk for clients' states, but for those of `before`, to survive a loss of
        power: files and folders."""

    @abstractmethod
    def keep(self, kept: Sequence[Mapping[Id, int]], busy: Collection[Id]) -> None:
        """Of client states none but these versions are needed, one for each kept checkpoint, and those of clients who
        are busy."""

    @abstractmethod
    def save_models(self, folder: Path, about: dict[str, Any], t: int) -> None:
        """Save every client's own model, if the method has one, as `client-<i>.safetensors`, where the client is."""
