"""The processes and files of a deployment: certificates, keys, Flower's SuperLink, the nodes, the submitted run.

TLS and the nodes' keys keep out eavesdroppers and unknown nodes. Flower's Control API, by which nodes are registered
and runs submitted, shares the port: it accepts only requests of this machine with the deployment's token
(`fewbytes.flower.guarded`).
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fewbytes.base.address import host_and_port
from fewbytes.base.errors import FewbytesError, UserError
from fewbytes.base.files import lock, private_folder
from fewbytes.base.processes import Process, is_alive
from fewbytes.flower import registration
from fewbytes.flower.certificates import node_name, trusting, write_certificates, write_file, write_node_key
from fewbytes.flower.children import (
    Child,
    command_of,
    end,
    executable,
    family_of,
    free_port,
    is_loopback,
    listen,
    why_of,
)
from fewbytes.flower.commands import Commands
from fewbytes.flower.node_file import NodeFile
from fewbytes.flower.private import cli, files, programs

START_SECONDS = 120  # for the SuperLink to answer
LAUNCHER_SECONDS = 60  # after that, for the launcher of runs' servers
CA, LOCAL = "certificates/ca.crt", "local.pem"


class Ended(NamedTuple):
    """A node whose process has ended on its own: its exit code (negative: a signal) and why, from its log."""

    name: str
    exit_code: int
    reason: str


class Processes:
    """Flower's processes over one folder and one address; leaving the context ends all it started, the logs stay.

    `any_app`: whether SuperNodes run whatever applications are submitted, one after another, not only the one installed
    with this package, once.
    `resident`: nodes are ours (`fewbytes.flower.resident`), not Flower's SuperNodes; they run no other application.
    `lasting`: whether the registered nodes outlive a restart; then what passes through lies in a file, not in memory.
    `certificates`: their folder, if it is not the one below.

    In the folder: certificates/ (with the token), keys/, nodes/ (what resident nodes are), flower-home/ and homes/
    (FLWR_HOME of the SuperLink and of each SuperNode), superlink.db (the registered nodes, kept over a restart;
    messages are not), logs/. `address` is where the SuperLink listens, "host:port"; for port 0 a free one is in
    `.address`. On Linux all of it also ends when the thread ends that started it, or this process is killed. Raises
    UserError for another address, a folder in use, or without Flower.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        any_app: bool = True,
        resident: bool = False,
        lasting: bool = True,
        certificates: Path | None = None,
    ) -> None:
        self._host, port = host_and_port(address)
        self._port = port or free_port(self._host)
        self.address = f"{address.rpartition(':')[0]}:{self._port}"
        self.folder, self._ports, self._any_app, self.resident = folder.absolute(), {self._port}, any_app, resident
        self.certificates = certificates.absolute() if certificates else self.folder / "certificates"
        self._token, self._lasting = self.folder / "certificates" / "control.token", lasting
        self._superlink: Child | None = None
        self._launchers, self._answered = set[Process](), 0.0  # what becomes the run's server; since when it may
        self._commands: Commands | None = None
        self._nodes: dict[str, Child] = {}
        self._lock: BinaryIO | None = None

    def __enter__(self) -> Processes:
        for command in programs.COMMANDS:
            executable(command)
        private_folder(self.folder)
        (self.folder / "logs").mkdir(exist_ok=True)
        self._lock = lock(self.folder / "lock")
        if self._lock is None:
            raise UserError(f"{self.folder}: another deployment is running there: stop it, or wait for its end")
        files.purge(self.folder / files.DATABASE)  # of a deployment that was killed
        return self

    def __exit__(self, *_: object) -> None:
        try:
            end(list(self._nodes.values()))  # first, for they sign off
        finally:
            end([self._superlink] if self._superlink else [])
            files.purge(self.folder / files.DATABASE)
            self._nodes, self._superlink = {}, None
            self.rest()
            if self._lock is not None:
                self._lock.close()

    def rest(self) -> None:
        """End the process that runs `flwr` commands, which takes 70 MB. The next command starts another."""
        if self._commands is not None:
            self._commands.close()
            self._commands = None

    @property
    def local_address(self) -> str:
        """Where this host reaches the SuperLink: a loopback address, or localhost where the certificate covers none."""
        if self._local_ca.name == LOCAL:
            return f"localhost:{self._port}"
        return self.address if is_loopback(self._host) else f"127.0.0.1:{self._port}"

    @property
    def _local_ca(self) -> Path:
        """The certificate that proves the SuperLink to programs of this host."""
        local = self.certificates / LOCAL
        return local if local.exists() else self.certificates / "ca.crt"

    def superlink_command(self) -> list[str]:
        """The SuperLink's command line."""
        folder = self.folder
        database = folder / files.DATABASE if self._lasting else None
        local = programs.Local(self._token, self.local_address, self._local_ca, many=self._any_app)
        return programs.superlink_command(self._host, self._port, self.certificates, database, local)

    def node_command(
        self,
        name: str,
        node_config: Mapping[str, str | int],
        superlink: str | None = None,
        folder: Path | None = None,
        port: int = 9094,
    ) -> list[str]:
        """A node's command line, for this host or another; of a resident one, the file that says what it is is written.
        Raises UserError for a value that Flower cannot take.

        `superlink`: where that host reaches the SuperLink; `folder`: the one here that is copied to another host and
        has certificates/ca.crt and keys/<name>; `port`: a loopback port for each SuperNode of a host.
        """
        python = "python3" if folder else sys.executable
        superlink = superlink or self.local_address
        if self.resident:
            path = self.folder / "nodes" / f"{name}.toml" if folder is None else folder / "node.toml"
            path.parent.mkdir(exist_ok=True)
            up = "../" if folder is None else ""
            proof = CA if folder else os.path.relpath(self._local_ca, path.parent)
            about = NodeFile(superlink, proof, f"{up}keys/{node_name(name)}", dict(node_config))
            write_file(path, about.text().encode(), 0o600)
            return [python, "-m", "fewbytes", "node", path.name if folder else str(path)]
        there, ca = (Path("."), Path(CA)) if folder else (self.folder, self._local_ca)
        guarded_by = None if self._any_app else python
        return programs.supernode_command(
            superlink, port, ca, there / "keys" / node_name(name), node_config, guarded_by
        )

    def start_superlink(self, hosts: Sequence[str] = ()) -> None:
        """Start the SuperLink and wait until it answers with TLS; its certificates are made if there are none.

        `hosts`: more names and IPs by which nodes reach it. Raises UserError for a port in use or certificates that do
        not cover the hosts, FewbytesError if it does not come up.
        """
        write_certificates(self.certificates, hosts)
        local = self.local_address.rpartition(":")[0].strip("[]")
        try:
            listen(self._host, self._port).close()
        except OSError as error:
            raise UserError(f"the SuperLink cannot listen on {self.address}: {why_of(error)}") from None
        home = self.folder / "flower-home"
        self.write_link()
        tls = trusting(self._local_ca)
        self._superlink = Child(self.superlink_command(), home, self.folder / "logs" / "superlink.log")
        self._commands = self._commands or Commands(home)  # it loads what it needs meanwhile
        deadline = time.monotonic() + START_SECONDS
        while True:
            self.check()
            with suppress(OSError), socket.create_connection((local, self._port), 5) as plain:
                tls.wrap_socket(plain, server_hostname=local).close()
                self._launchers, self._answered = set(), time.monotonic()
                return
            if time.monotonic() > deadline:
                why = self._superlink.reason()
                raise FewbytesError(f"the SuperLink did not answer on {self.address} in {START_SECONDS} s: {why}")
            time.sleep(0.1)

    def write_link(self) -> None:
        """Write the SuperLink's address and token for `flwr`, with flower-home as its FLWR_HOME."""
        home = self.folder / "flower-home"
        home.mkdir(exist_ok=True)
        name, text = files.connection_config(self.local_address, self._local_ca)
        write_file(home / name, text.encode())
        if not self._token.exists():
            self._token.parent.mkdir(exist_ok=True)
            write_file(self._token, secrets.token_hex(32).encode(), 0o600)
        name, text = files.credentials(self.local_address, self._token.read_text())
        write_file(home / name, text.encode(), 0o600)

    def check(self) -> None:
        """Raise FewbytesError if the SuperLink has ended on its own."""
        if self._superlink and (code := self._superlink.process.poll()) is not None:
            why = f"{self._superlink.reason()} ({self._superlink.log})"
            raise FewbytesError(f"the SuperLink ended with exit code {code}: {why}")

    def check_launcher(self) -> None:
        """Raise FewbytesError if the launcher of runs' servers is missing, without which no run would begin.

        A new SuperLink has LAUNCHER_SECONDS to start it. Without /proc, this is not checked.
        """
        if self._superlink is None or not Path("/proc/self/stat").exists():
            return
        if not self._launchers:
            family = family_of({self._superlink.process.pid})
            commands = {each: [Path(argument).name for argument in command_of(each)] for each in family}
            self._launchers = {each for each, command in commands.items() if programs.LAUNCHER in command}
        late = time.monotonic() > self._answered + LAUNCHER_SECONDS
        if not any(map(is_alive, self._launchers)) and (self._launchers or late):
            why = f"which is to start the run's server, has ended ({self.folder / 'logs' / 'superlink.log'})"
            raise FewbytesError(f"{programs.LAUNCHER}, {why}")

    def ended(self) -> list[Ended]:
        """The nodes started here whose process has ended on its own."""
        codes = {name: node.process.poll() for name, node in self._nodes.items()}
        return [Ended(name, code, self._nodes[name].reason()) for name, code in codes.items() if code is not None]

    def register(self, names: Sequence[str]) -> None:
        """Register these nodes by keys/<name>.pub, made with its private key if absent; a name's other key is removed.

        Raises FewbytesError with Flower's message, UserError for a key that was removed earlier.
        """
        for name in names:
            write_node_key(self.folder / "keys", name)
        registration.register(self._one, {name: self.folder / "keys" / f"{name}.pub" for name in names})

    def keep_only(self, names: Sequence[str]) -> list[str]:
        """Remove all registered nodes but these; returns the names of the removed ones. Raises FewbytesError."""
        return registration.keep_only(self._one, names)

    def node_status(self) -> dict[str, str]:
        """Each registered node's "registered" (never seen yet), "online" or "offline". Raises FewbytesError."""
        return {node.name: node.status for node in registration.registered(self._one)}

    def node_ids(self) -> dict[str, str]:
        """Each registered node's number at the SuperLink. Raises FewbytesError."""
        return {node.name: node.id for node in registration.registered(self._one)}

    def start_node(
        self, name: str, node_config: Mapping[str, str | int], home: Path | None = None, superlink: str | None = None
    ) -> None:
        """Start a node, or start it again; `ended` says what becomes of it. A resident one waits for what is not there
        yet, the SuperLink and its being registered; a SuperNode ends.

        `home` is a SuperNode's FLWR_HOME, `superlink` where it finds the SuperLink, if not where this host does.

        Flower refuses a SuperNode for a minute after a kill -9. Raises UserError if the node runs already or has no
        private key.
        """
        key = self.folder / "keys" / node_name(name)
        if not key.exists() or (name in self._nodes and self._nodes[name].process.poll() is None):
            raise UserError(f"the node {name} is running already" if key.exists() else f"{key}: no such private key")
        home = home or self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        port = 0 if self.resident else free_port("127.0.0.1", self._ports)
        self._ports.add(port)
        command = self.node_command(name, node_config, superlink, port=port)
        variables = programs.ENVIRONMENT if self.resident else programs.SUPERNODE_ENVIRONMENT
        self._nodes[name] = Child(command, home, self.folder / "logs" / f"{name}.log", variables)

    def submit(self, app: Path) -> int:
        """Submit the Flower app in the folder `app`, one for each start of the SuperLink; its run's id. Raises
        FewbytesError with Flower's message."""
        return cli.run_id(self._one(f"submitting {app}", cli.submit_command(app.absolute())))

    def run_status(self, run: int) -> tuple[str, str]:
        """A run's status and details: pending, starting, running, finished:completed, …:failed, …:stopped.

        Raises FewbytesError with Flower's message.
        """
        return cli.run_status(self._one(f"run {run}", cli.run_status_command(run)))

    def stop(self, run: int) -> None:
        """Stop a run. Raises FewbytesError with Flower's message, also if it has finished."""
        self._one(f"stopping run {run}", cli.stop_command(run))

    def _one(self, doing: str, command: Sequence[str]) -> dict[str, Any]:
        """The answer of a `flwr` command. Raises FewbytesError with what was being done."""
        self.check()
        self._commands = self._commands or Commands(self.folder / "flower-home")
        answer = cli.read_answer(self._commands.run(cli.in_json(command)))
        if why := cli.failure(answer):
            raise FewbytesError(f"{doing}: {why}")
        return answer
