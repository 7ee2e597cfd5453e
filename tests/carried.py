"""A federation whose rounds are carried as files, in this process: whenever the server waits, its sites work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from fewbytes.experiments.app import client
from fewbytes.experiments.deploy_by_mailbox import write_deployment
from fewbytes.experiments.hosts import write_site
from fewbytes.experiments.mailbox import Mail
from fewbytes.experiments.places import Nodes, places
from fewbytes.experiments.prepared import PreparedRun
from fewbytes.experiments.settings import make_experiment
from fewbytes.federation import members
from fewbytes.flower.apps import serve_run
from fewbytes.flower.mailbox_site import carry_out_once
from fewbytes.running.watcher import Watcher

NAMES = ("north", "south", "west")
SETTINGS = {"method": "fedavg", "rounds": 2, "parameters": {"batch": 40}, "model": "mlp", "engine": "flower-deployment"}


class Federation:
    """A federation in a folder, with the folders of its sites and a mailbox.

    `place`: of the mailbox, by default a folder in it. `before`, `after`: called when the server waits, before and
    after its sites work. `lines`: what sites and server have said.
    """

    def __init__(self, folder: Path, names: Sequence[str] = NAMES, place: str = "") -> None:
        self.folder, self.names, self.box = folder, names, folder / "box"
        self.place = place or str(self.box)
        self.home = folder / "federation"
        self.lines: list[str] = []
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        members.make(self.home, "server.example:9092", None)
        for name in names:
            self._join(name)

    def _join(self, name: str) -> None:
        request = write_site(self.folder / name, members.invite(self.home, name), name)
        members.join(self.home, request)

    def add(self, name: str) -> None:
        """Another member, whose site works from now on."""
        self._join(name)
        self.names = (*self.names, name)

    def files(self, name: str, kind: str) -> list[Path]:
        """A member's orders (`inbox`) or answers (`outbox`)."""
        return sorted((self.box / name / kind).glob("*"))

    def work(self, name: str, inbox: Path | None = None, outbox: Path | None = None) -> int:
        """A job of a site, by default on its folders in the mailbox."""
        if inbox is None and self.place == str(self.box):  # a job starts once the server has made the folder
            (self.box / name / "inbox").mkdir(parents=True, exist_ok=True)
        boxes = [str(given or f"{self.place}/{name}/{kind}") for given, kind in ((inbox, "inbox"), (outbox, "outbox"))]
        return carry_out_once(self.folder / name / "node.toml", client, boxes[0], boxes[1], self.lines.append)

    def run(self, out: str = "run", resume: bool = False, from_round: int | None = None, **settings: object) -> Path:
        """Run the server half to its end; returns the run's folder."""
        wanted = {**SETTINGS, "clients": len(self.names), **settings}
        job = PreparedRun(wanted, here=())
        (folder := self.folder / out).mkdir(exist_ok=True)
        write_deployment(folder, self.how(job), None if resume else make_experiment(wanted).toml())
        names = [place.name for place in self.how(job).places]
        mail = Mail(self.place, self.home, names)
        exchange = replace(mail.exchange(job.experiment, folder, self.lines.append), stop=_Working(self))
        serve_run(None, job.found.run(folder, resume, Watcher(), from_round), names, exchange)
        return folder

    def how(self, job: PreparedRun) -> Nodes:
        """The nodes of a run."""
        address, count = "server.example:9092", job.experiment.partition
        free = range(count.clients + count.newcomers - len(self.names))
        names = [*self.names, *(f"newcomer-{i + 1}" for i in free)]  # as `places_for` names them
        where = places(job.experiment, ",".join(names))
        return Nodes(where, address, federation=self.home, mailbox=self.place)


class _Working(threading.Event):
    """Lets the sites work while the server waits for this event."""

    def __init__(self, federation: Federation) -> None:
        super().__init__()
        self.federation = federation

    def wait(self, timeout: float | None = None) -> bool:
        self.federation.before()
        for name in self.federation.names:
            self.federation.work(name)
        self.federation.after()
        return False


def assert_as_on_one_machine(federation, carried, **settings):
    """The global model of a carried run is equal to the local engine's, to the bit."""
    local = federation.folder / "local"
    wanted = {**SETTINGS, "engine": "local", "clients": len(federation.names), **settings}
    PreparedRun(wanted).execute(local, False, page=False)
    one, other = (load_file(folder / "models" / "global.safetensors") for folder in (carried, local))
    assert other
    assert all(torch.equal(one[name], other[name]) for name in other)
