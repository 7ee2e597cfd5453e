"""Deployments with one command: write the app, start Flower's processes or print their commands, follow the run."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbytes.base.errors import FewbytesError, UserError
from fewbytes.base.files import make_all_durable, open_plain, replacing
from fewbytes.base.named import MODULES
from fewbytes.base.processes import is_alive
from fewbytes.experiments.hosts import ENVIRONMENT, Settled, write_host
from fewbytes.experiments.membership import Membership
from fewbytes.experiments.places import Nodes, write_places
from fewbytes.federation.members import CERTIFICATES
from fewbytes.flower.application import EVENTS, application_files
from fewbytes.flower.certificates import expiry_note, write_certificates, write_node_key
from fewbytes.flower.children import send
from fewbytes.flower.private import cli, files, programs
from fewbytes.flower.processes import Processes
from fewbytes.running.signals import terminating
from fewbytes.running.watcher import EVENT_NAMES, Watcher

if TYPE_CHECKING:  # it needs torch
    pass

ASKED = "asked.toml"  # in the deployment's folder: the run's settings as given
BEGINNING = ("config.toml", "partition.json", "rounds.jsonl")
"""Files that a run writes, besides checkpoints, before its first round."""
SLOW_SECONDS = 30  # between notes that the run's server has not begun yet
QUIET_SECONDS = 15  # without events, after which Flower is asked for the status of the run
AGAIN_SECONDS, TRIES = 8, 12  # between restarts of a node, and their maximum number


def write_asked(out: Path, asked: str) -> None:
    """Write the settings of a new run as they were given, and remove the files of an earlier one in its folder that has
    no checkpoint."""
    if (out / "deployment" / ASKED).exists():
        shutil.rmtree(out / "checkpoint", ignore_errors=True)
        for name in BEGINNING:
            (out / name).unlink(missing_ok=True)
    with replacing(out / "deployment" / ASKED) as file:
        file.write(asked.encode())


def end_server(out: Path) -> None:
    """End the server of a killed deployment of the run in `out`, which survives while it retries its SuperLink.

    Its first event holds its process id. The process is killed only if it still is that server.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):  # no event, or half of one
        with open(out / EVENTS, encoding="utf-8", opener=open_plain) as file:
            event = json.loads(file.readline())
        server = int(event["pid"]), str(event["started"])
        if programs.SERVER.encode() in Path(f"/proc/{server[0]}/cmdline").read_bytes() and server[1]:
            send(server, signal.SIGKILL)  # checkpoints are written atomically


class Deployment:
    """A run deployed in `<run folder>/deployment`.

    `settled`: its settings. `resume`, `from_round`: as in `Settings`. `asked`: the settings as they were given, as a
    config.
    """

    def __init__(
        self,
        settled: Settled,
        folder: Path,
        nodes: Nodes,
        resume: bool,
        from_round: int | None = None,
        asked: str = "",
    ) -> None:
        self.remote, self._settled = nodes.remote, settled
        self.out, self.nodes, self._how = folder.absolute(), nodes.places, nodes
        self.resume, self.from_round, self._asked, self._salt = resume, from_round, asked, secrets.token_hex(16)
        self.folder, self._again = self.out / "deployment", dict[str, tuple[int, float]]()
        own = None if nodes.federation is None else nodes.federation / CERTIFICATES
        self.processes = Processes(self.folder, nodes.bind, False, nodes.kind == "resident", self.remote, own)
        names = [place.name for place in self.nodes]
        self._members = None if nodes.federation is None else Membership(nodes.federation, self.folder, names)
        self.address = nodes.resolved(int(self.processes.address.rpartition(":")[2]))
        self._names = [self.address.rpartition(":")[0].strip("[]")] if self.remote else []  # for the certificate

    def prepare(self) -> None:
        """Write all files, and start nothing."""
        with self.processes:
            self._write()

    def _write(self) -> None:
        """Write the app, the certificates and a folder per remote node; remove the state of an earlier SuperLink."""
        end_server(self.out)
        if not self.resume:
            write_asked(self.out, self._asked)
        (self.out / EVENTS).unlink(missing_ok=True)
        if not self.remote:  # a new SuperLink: the old one considers its nodes connected for another minute
            for name in files.DATABASE_FILES:
                (self.folder / name).unlink(missing_ok=True)
        if self._members is not None:
            self._members.write_keys()
        self._write_app()
        write_places(self.out, self._how)
        write_certificates(self.processes.certificates, self._names)
        self.processes.write_link()
        for i, place in enumerate(self.nodes if self._members is None else ()):
            write_node_key(self.folder / "keys", place.name)
            if not place.here:
                config: dict[str, str | int] = {"partition-id": i, **self._settled.privacy, **self._settled.allowed}
                write_host(self.processes, place.name, config, self.address)
        make_all_durable(self.folder)

    def commands(self) -> str:
        """The commands to run, and where."""
        home = shlex.quote(f"{self.folder}/flower-home")
        lines = ["on this machine:", f"  export {programs.HOME}={home} {ENVIRONMENT}"]
        lines.append(f"  {shlex.join(self.processes.superlink_command())}")
        for i, place in enumerate(self.nodes):
            if not (self.folder / "keys" / f"{place.name}.pub").exists():
                continue  # nobody has joined yet
            register = cli.register_command(self.folder / "keys" / f"{place.name}.pub", place.name)
            lines.append(f"  {shlex.join(register)}")
            if place.here:
                command = self.processes.node_command(place.name, self._node_config(i), port=9094 + i)
                own = shlex.quote(f"{self.folder}/homes/{place.name}")
                lines.append(f"  {programs.HOME}={own} {shlex.join(command)}")
        lines.append(f"  {shlex.join(cli.submit_command(self.folder / 'app'))}")
        return "\n".join([*lines, *self.elsewhere()])

    def elsewhere(self) -> list[str]:
        """The commands to run on other hosts."""
        names = [place.name for place in self.nodes if not place.here and self._members is None]
        heading = "on each other host, with this package installed, in a copy of its folder there: sh start.sh"
        return [heading, *(f"  {self.folder}/nodes/{name}" for name in names)] if names else []

    def execute(self, watcher: Watcher, note: Callable[[str], None], step: Callable[[str], None]) -> None:
        """Start Flower, submit the run, follow it to its end; `step` is called with what happens before the run begins.
        Raises the error of the run's server.

        After a KeyboardInterrupt, or the end of the SuperLink, the run folder can be resumed.
        """
        os.environ.setdefault(MODULES, os.getcwd())
        with terminating(), self.processes:
            self._write()
            if self.processes.resident:  # they load while the SuperLink starts
                self._start_nodes()
            step(f"starting Flower's SuperLink on {self.processes.address}")
            self.processes.start_superlink(self._names)
            if self._members is None:
                self.processes.register([place.name for place in self.nodes])
            self._look(note)
            if not self.processes.resident:
                self._start_nodes()
            if lines := self.elsewhere():
                note("\n".join(lines))
            if why := expiry_note(self.processes.certificates):
                note(why)
            step("starting the run's server")
            number = self.processes.submit(self.folder / "app")
            try:
                self._follow(number, watcher, note)
            except FewbytesError as error:
                if (self.out / "config.toml").exists():
                    raise type(error)(
                        f"{error}; resume with: fewbytes deploy --resume {shlex.quote(str(self.out))}"
                    ) from None
                raise

    def _look(self, note: Callable[[str], None]) -> None:
        """Follow changes of the federation."""
        for text in () if self._members is None else self._members.sync(self.processes):
            note(text)

    def _start_nodes(self) -> None:
        for i, place in enumerate(self.nodes):
            if place.here:
                self.processes.start_node(place.name, self._node_config(i))

    def _follow(self, number: int, watcher: Watcher, note: Callable[[str], None]) -> None:
        server, begun, dead, quiet = (0, ""), False, 0, time.monotonic() + QUIET_SECONDS
        asked, slow = time.monotonic(), time.monotonic() + SLOW_SECONDS
        self._again = {}  # nodes that ended: attempts so far, earliest next one
        try:
            for event in self._events():
                self._look(note)
                if event is None:
                    self.processes.check()
                    if not server[0]:
                        self.processes.check_launcher()
                        if time.monotonic() > slow:
                            note(
                                f"the run's server has been starting for {time.monotonic() - asked:.0f} s; please wait"
                            )
                            slow = time.monotonic() + SLOW_SECONDS
                    self._start_again(note, hopeless=not begun)
                    dead = dead + 1 if begun and not is_alive(server) else 0
                    if dead > 3:  # and no further event came
                        raise FewbytesError(f"the run's server died; see {self.folder / 'logs'}")
                    if time.monotonic() > quiet and not begun:
                        quiet = time.monotonic() + QUIET_SECONDS
                        status, details = self.processes.run_status(number)
                        if status.startswith("finished"):
                            raise FewbytesError(
                                f"the run's server ended without a message ({status} {details})".rstrip()
                            )
                    continue
                quiet = time.monotonic() + QUIET_SECONDS
                match event.pop("event"):
                    case "began":
                        server = event["pid"], event["started"]
                    case "started":
                        begun = True
                        self.processes.rest()
                        watcher.started(self.out, event["rounds"], event["done"])
                    case name if name in EVENT_NAMES:
                        getattr(watcher, name)(*event["what"])
                    case "interrupted":  # somebody ended the server: handle it as our own interrupt
                        raise KeyboardInterrupt
                    case "failed":
                        raise (UserError if event["mine"] else FewbytesError)(event["error"])
                    case "ended":
                        watcher.ended(json.loads((self.out / "result.json").read_bytes()))
                        return
        except FewbytesError as error:
            watcher.ended({"status": "failed", "why": str(error)})
            raise
        except KeyboardInterrupt:
            watcher.ended({"status": "interrupted"})
            if begun:  # let it write its result
                send(server, signal.SIGTERM)
                deadline = time.monotonic() + 10
                while is_alive(server) and time.monotonic() < deadline:
                    time.sleep(0.1)
            raise

    def _start_again(self, note: Callable[[str], None], hopeless: bool) -> None:
        """Restart nodes that ended; Flower refuses a node for a minute while it considers it connected.

        Raises FewbytesError if none starts at all (`hopeless`: the run has not begun).
        """
        for ended in self.processes.ended():
            tries, when = self._again.get(ended.name, (0, 0.0))
            if time.monotonic() < when:
                continue
            if not tries:
                why = f"exit code {ended.exit_code}: {ended.reason}"
                note(f"the node {ended.name} ended ({why}); restarting it")
            elif hopeless and tries > 2 and len(self._again) == len(self.nodes):
                raise FewbytesError(f"no node keeps running: {ended.name}: {ended.reason}")
            elif tries == TRIES:
                note(f"the node {ended.name} does not start: {ended.reason}")
            if tries < TRIES:
                client = [place.name for place in self.nodes].index(ended.name)
                self.processes.start_node(ended.name, self._node_config(client))
            self._again[ended.name] = (tries + 1, time.monotonic() + AGAIN_SECONDS)

    def _events(self) -> Iterator[dict[str, Any] | None]:
        """Events of the run's server as they arrive; None at intervals while there are none."""
        path, position = self.out / EVENTS, 0
        while True:
            text = b""
            with suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(position)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            position += len(whole)
            for line in whole.splitlines():
                yield json.loads(line)
            if not whole:
                yield None
                time.sleep(0.2)

    def _node_config(self, client: int) -> dict[str, str | int]:
        config: dict[str, str | int] = {"partition-id": client, "folder": str(self.out.parent)}
        config |= {
            "tell": "figures",
            "min-count": 1,
            "survey-salt": self._salt,
            "max-runs": 1_000_000,
            "privacy-in-all": "any",
        }  # no limits: the server is on the same machine
        return config | self._settled.allowed

    def _write_app(self) -> None:
        app = self.folder / "app"
        app.mkdir(exist_ok=True)
        names = ",".join(place.name for place in self.nodes)
        config = self._settled.run_config | {"out": str(self.out), "resume": self.resume, "names": names}
        config |= {} if self.from_round is None else {"from_round": self.from_round}
        if self._how.federation is not None:
            config["federation"] = str(self._how.federation.absolute())
        if self._how.mailbox is not None:
            config |= {"mailbox": self._how.mailbox, "by_mailbox": self._how.by_mailbox or ""}
        for name, text in application_files(config).items():
            with replacing(app / name) as file:
                file.write(text.encode())
