"""What each engine implements: a transport of jobs and answers, and what it knows of the clients' sites."""

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
    """The answer to a job. `outcome`: one of `fewbytes.core.ledger.OUTCOMES`; `why`: the reason for a failure;
    `frame`: the reply's, valid until the job is ended; `different`: the node runs something else than the server;
    `moving`: seconds of transfer, if known."""

    outcome: str
    why: str = ""
    done: Done = Done(0)
    frame: memoryview = memoryview(b"")
    different: bool = False
    moving: float | None = None


class Transport(ABC):
    """Sends jobs to clients, and returns their answers."""

    ahead: int = 1
    """The number of jobs to submit before the first answer is needed."""

    def reaches(self, client: Id) -> bool:
        """Whether the client is reachable."""
        return True

    def put(self, frame: Frame) -> str:
        """Store a message's frame where its readers find it; returns its name, empty if it is sent with the job."""
        return ""

    def free(self, at: str) -> None:
        """Remove a frame stored by `put`."""

    @abstractmethod
    def submit(self, job: Job, frames: Sequence[bytes], call: int) -> bool:
        """Send a job and the frames that go with it; returns whether it was sent. `call`: the number of its call in
        the step (0: a stream)."""

    @abstractmethod
    def poll(self, jobs: Sequence[Job], most: int) -> Mapping[int, Answer]:
        """Wait a while for answers to these jobs; returns those that have arrived, by job number. Fetches at most
        `most` at once."""

    @abstractmethod
    def end(self, jobs: Sequence[Job]) -> None:
        """Release the answers to these jobs, and cancel the jobs that are not finished."""

    def processes(self) -> list[int]:
        """The ids of its processes on this machine, including this one."""
        return [os.getpid()]


class Sites(ABC):
    """What an engine knows of its clients' sites."""

    def called(self, client: Id) -> str:
        """A client's display name."""
        return f"client {client}"

    def reaches(self, client: Id) -> bool:
        """Whether the client was reachable when last looked."""
        return True

    def arrivals(self, due: Sequence[Id]) -> tuple[list[Id], list[LeftOut]]:
        """Split due clients that have not joined yet: those that can take part, and the others with the reason."""
        return list(due), []

    def patient(self, tries: int) -> bool:
        """Wait before the `tries`-th retry of a round with too few replies; False: do not retry."""
        return False

    @abstractmethod
    def places(self, before: Mapping[Id, int]) -> list[Path]:
        """The paths to sync on this machine so that clients' states survive a power failure, without those of
        `before`."""

    @abstractmethod
    def keep(self, kept: Sequence[Mapping[Id, int]], busy: Collection[Id]) -> None:
        """Allow removing client states, except these versions (one mapping for each kept checkpoint) and those of busy
        clients."""

    @abstractmethod
    def save_models(self, folder: Path, about: dict[str, Any], t: int) -> None:
        """Save each client's own model, if the method has one, as `client-<i>.safetensors` at the client's site."""
