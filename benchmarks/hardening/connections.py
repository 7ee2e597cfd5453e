"""What bad links and bad connections do to a deployment: uploads that break off, links that flap, clients that come and
go, servers that are not the server, sockets that say nothing."""

from __future__ import annotations

import datetime
import logging
import os
import random
import signal
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPSConnection
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from figures import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import httpx
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.hazmat.primitives.serialization.ssh import load_ssh_private_key
from deployment import VERSION, _ask, _signed
from flower_grid import MemoryGrid
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.fleet_http_connection import make_simple_http_retry_invoker
from proxied import Snapshots, deploy
from proxy import Faults, Proxy
from replies import MANY, small_task

import fewbytes as fb
from fewbytes.experiments.settings import Experiment, make_experiment
from fewbytes.flower.apps import client_app, serve_run
from fewbytes.flower.certificates import write_certificates, write_node_key
from fewbytes.flower.children import family_of
from fewbytes.flower.fleet import Fleet
from fewbytes.flower.link import Exchange
from fewbytes.flower.private.supernode import retrying_more
from fewbytes.flower.processes import Processes
from fewbytes.running.node_status import NodeWatch
from fewbytes.running.run import Run
from fewbytes.running.settings import Settings

logging.getLogger("flwr").setLevel(logging.CRITICAL)
MIB = 1 << 20
YES = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Taken(NamedTuple):
    """What processes take: MiB of memory, open files, threads."""

    memory: float
    files: int
    threads: int


def taken(pid: int, started: bool = True) -> Taken:
    """What a process takes, with all that it `started`."""
    memory = files = threads = 0
    for each in {number for number, _ in family_of({pid})} if started else {pid}:
        with suppress(OSError):
            place = Path(f"/proc/{each}")
            said = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
            memory += int(said["VmRSS"].split()[0]) << 10
            threads += int(said["Threads"])
            files += len(os.listdir(place / "fd"))
    return Taken(memory / MIB, files, threads)


def small(rounds: int, clients: int = 2, **others: Any) -> Experiment:
    """A run on the digits that is scored at its end."""
    own = {"epochs": 1, "lr": 0.05, "batch": 20}
    settings = {
        "method": "fedavg", "dataset": "digits", "clients": clients, "samples": "40/10", "rounds": rounds,
        "evaluate_every": 1000, "save_models": False, "parameters": own,
    }  # fmt: skip
    return make_experiment(settings | others)


class Counting(Snapshots):
    """Also what the SuperLink takes, with the processes that it started, when a round is done."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.link = list[Taken]()

    @property
    def pid(self) -> int:
        return self.deployed.processes._superlink.process.pid

    def scored(self, row: dict[str, Any]) -> None:
        super().scored(row)
        self.link.append(taken(self.pid))


def flat(what: str, before: Taken, after: Taken, spare: int = 3) -> list[Figure]:
    """Whether files and threads are as many as they were, but for so many."""
    return [
        Figure(f"{what}: {name} open before and after", f"{a}, {b}", f"at most {spare} more", b <= a + spare)
        for name, a, b in (("files", before.files, after.files), ("threads", before.threads, after.threads))
    ]


# --------------------------------------------------------------------------------------------- 18: weeks of work


class Lasting(Snapshots):
    """MiB of memory of a node, of the SuperLink and of all that this started, after each round."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.memory: dict[str, list[float]] = {"a node": [], "the SuperLink": [], "it and the run's server": []}

    def scored(self, row: dict[str, Any]) -> None:
        super().scored(row)
        flower = self.deployed.processes
        link, node = flower._superlink.process.pid, flower._nodes["client-0"].process.pid
        took = taken(node).memory, taken(link, started=False).memory, taken(link).memory
        for what, each in zip(self.memory, took, strict=True):
            self.memory[what].append(each)


def soak(rounds: int) -> list[Figure]:
    """Row 18: so many rounds of a deployment of two nodes."""
    with tempfile.TemporaryDirectory() as name:
        experiment = small(rounds, engine="flower-deployment", round_timeout=60)
        seen = deploy(experiment, Path(name), watched_by=Lasting, node=KIND)
    found, half = [], rounds // 2
    for what, memory in seen.memory.items():
        growth = (statistics.median(memory[-5:]) - statistics.median(memory[half : half + 5])) * 100 / half
        figure = f"{growth:.2f} MiB per 100 rounds"
        found.append(
            Figure(
                f"a deployment, {rounds} rounds, {what}: growth in the second half", figure, "under 1 MB", growth < 0.95
            )
        )
    left = sum(len(row.get("left_out", [])) for row in seen.rows)
    return [*found, Figure(f"replies lost of {2 * rounds}", str(left), "0", not left)]


# ------------------------------------------------------------------------------------------------ 5: killed uploads


class Killing(Counting):
    """Kills client 1's node, with all it started, while it uploads its reply of round 2."""

    def scored(self, row: dict[str, Any]) -> None:
        super().scored(row)
        if row["round"] == 1:
            threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self) -> None:
        proxy, process = self.proxies[1], self.deployed.processes._nodes["client-1"].process
        until = proxy.up.bytes + random.Random(0).randrange(200_000, 1_200_000)
        while proxy.up.bytes < until:
            time.sleep(0.01)
        for pid, _ in family_of({process.pid}):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


KIND = os.environ.get("FEWBYTES_NODE", "resident")
"""Of which kind the nodes of deployments are: resident or stock."""


def killed_uploads(times: int) -> list[Figure]:
    """Row 5: a node of a deployment killed while it uploads; and so many uploads to a SuperLink that break off."""
    rounds = 3
    with tempfile.TemporaryDirectory() as name:
        experiment = small(rounds, model="resnet8", engine="flower-deployment", min_replies=0.5, round_timeout=60)
        seen = deploy(experiment, Path(name), up=Faults(rate=1e6), watched_by=Killing, node=KIND)
        done = len([row for row in seen.rows if row["round"] <= rounds])
    assert any("SIGKILL" in note for note in seen.notes), "no node was killed: this measures nothing"
    left = [each["outcome"] for row in seen.rows for each in row.get("left_out", [])]
    found = [
        Figure(
            f"one of two nodes killed (kill -9) while it uploads 1.5 MB, and restarted ({len(left)} of {2 * rounds} "
            "replies missed): rounds done",
            f"{done} of {rounds}",
            "all",
            done == rounds,
        ),
        *flat("the SuperLink and the run's server", seen.link[0], seen.link[-1]),
    ]
    with superlink() as (link, keys, ids):
        pid, rng = link._superlink.process.pid, random.Random(0)
        _break_off(link, keys, rng, 20)
        before = _settled(pid)
        _break_off(link, keys, rng, times)
        after = _settled(pid)
        served = _ask(link, ids["a"], _signed(keys["a"], keys["a"])) == 200
    growth = after.memory - before.memory
    what = f"{times} uploads of 4 MB reset at a drawn byte, after 20 others"
    return [
        *found,
        Figure(
            f"{what}: growth of the SuperLink's memory "
            "(garbage: one made to collect and return it every second stays flat)",
            f"{growth:.1f} MiB",
            "at most 4 MiB",
            growth <= 4,
        ),
        *flat(what, before, after),
        Figure("requests are served afterwards", "yes" if served else "no", "yes", served),
    ]


@contextmanager
def superlink() -> Iterator[tuple[Processes, dict[str, Any], dict[str, str]]]:
    """A SuperLink, the keys of two nodes that are registered, and their ids."""
    with tempfile.TemporaryDirectory() as name, Processes(Path(name), "127.0.0.1:0") as link:
        link.start_superlink()
        link.register(["a", "b"])
        ids = link.node_ids()
        keys = {who: load_ssh_private_key((link.folder / "keys" / who).read_bytes(), None) for who in ids}
        yield link, keys, ids


def _trusting(link: Processes) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=link.folder / "certificates" / "ca.crt")


def _address(link: Processes) -> tuple[str, int]:
    host, port = link.address.split(":")
    return host, int(port)


def _break_off(link: Processes, keys: dict[str, Any], rng: random.Random, times: int) -> None:
    """So many uploads of a registered node that are reset at a drawn byte, as the system does for who is killed."""
    size, tls = 4 * MIB, _trusting(link)
    for _ in range(times):
        with Proxy(*_address(link)) as proxy:
            there = HTTPSConnection("127.0.0.1", proxy.port, timeout=30, context=tls)
            there.putrequest("POST", "/v1/fleet/push-object")
            for key, value in (VERSION | _signed(keys["a"], keys["a"]) | {"Content-Length": str(size)}).items():
                there.putheader(key, value)
            there.endheaders(bytes(rng.randrange(size)))
            proxy.cut()
            there.close()


def _settled(pid: int) -> Taken:
    """What a SuperLink takes once it has closed what is closed."""
    time.sleep(2)
    return taken(pid, started=False)


# --------------------------------------------------------------------------------- 9: servers that are not the server


def impostors(times: int) -> list[Figure]:
    """Row 9: so many calls of a node to servers that are not its own, by kind; and what strangers make it hold."""
    found = []
    with superlink() as (link, keys, ids), tempfile.TemporaryDirectory() as name:
        ca = link.folder / "certificates" / "ca.crt"
        (control, honest), *false = _certificates(ca.parent).items()
        assert _taken(Path(name) / "own.pem", honest, ca, 1)[0] == 1, f"{control} is refused: this measures nothing"
        sent = 0
        for i, (kind, certificate) in enumerate(false):
            believed, heard = _taken(Path(name) / f"{i}.pem", certificate, ca, times)
            found.append(
                Figure(f"fake servers that a node accepted: {kind}", f"{believed} of {times}", "0", not believed)
            )
            sent = max(sent, heard // times)
        what = "bytes that a node sends to a server before it refuses it"
        found.append(Figure(what, f"{sent:,}", "at most 64 KiB", sent <= 65_536))

        pid, tls, size = link._superlink.process.pid, _trusting(link), 64 * MIB
        stranger = ec.generate_private_key(ec.SECP384R1())
        taken_by = {}
        for who, headers in {
            "nobody": {},
            "a key that is not registered": _signed(stranger, stranger),
            "another's key, signed by one's own": _signed(stranger, keys["a"]),
        }.items():
            before, statuses = _settled(pid).memory, []
            for _ in range(3):
                connection = HTTPSConnection(*_address(link), timeout=60, context=tls)
                with suppress(OSError):
                    connection.request("POST", "/v1/fleet/push-object", bytes(size), VERSION | headers)
                    statuses.append(connection.getresponse().status)
                connection.close()
            assert 200 not in statuses, f"{who} was heard"
            taken_by[who] = _settled(pid).memory - before
        assert _ask(link, ids["a"], _signed(keys["a"], keys["a"])) == 200
    most = max(taken_by.values())
    what = "memory that three bodies of 64 MiB from a stranger take of the SuperLink, the worst of 3 kinds"
    return [*found, Figure(what, f"{most:.1f} MiB", "at most 4 MiB", most <= 4)]


def _certificates(folder: Path) -> dict[str, bytes]:
    """Certificates with their keys (PEM) of servers that no node may take for its own."""
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    ours, other = load_pem_private_key((folder / "ca.key").read_bytes(), None), ec.generate_private_key(ec.SECP384R1())
    named = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "another CA")])
    here, elsewhere = x509.IPAddress(ip_address("127.0.0.1")), x509.DNSName("elsewhere.example.org")

    def made(by: Any, issuer: x509.Name, place: x509.GeneralName, start: int, end: int) -> bytes:
        key, now = ec.generate_private_key(ec.SECP384R1()), datetime.datetime.now(datetime.UTC)
        days = (datetime.timedelta(days=each) for each in (start, end))
        called = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fewbytes SuperLink")])
        builder = x509.CertificateBuilder(
            issuer, called, key.public_key(), x509.random_serial_number(), *(now + each for each in days)
        ).add_extension(x509.SubjectAlternativeName([place]), critical=False)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return builder.sign(by, SHA384()).public_bytes(Encoding.PEM) + private

    return {
        "ours (the control)": made(ours, authority.subject, here, -1, 1),
        "of another authority": made(other, named, here, -1, 1),
        "of another authority with our authority's name": made(other, authority.subject, here, -1, 1),
        "expired": made(ours, authority.subject, here, -2, -1),
        "not valid yet": made(ours, authority.subject, here, 1, 2),
        "of another server": made(ours, authority.subject, elsewhere, -1, 1),
    }


def _taken(file: Path, certificate: bytes, ca: Path, times: int) -> tuple[int, int]:
    """How many of a node's calls a server with that certificate is trusted in, and the bytes it heard in all."""
    file.write_bytes(certificate)
    with _impostor(file) as proxy:
        return sum(_called(proxy.port, ca) for _ in range(times)), proxy.up.bytes


@contextmanager
def _impostor(certificate: Path) -> Iterator[Proxy]:
    """A server with that certificate that says yes to everything, and the proxy through which it is reached."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)

    def serve(plain: socket.socket) -> None:
        with suppress(OSError), tls.wrap_socket(plain, server_side=True) as connection:
            connection.recv(1 << 16)
            connection.sendall(YES)
            while connection.recv(1 << 16):
                pass

    with _served(serve) as address, Proxy(*address) as proxy:
        yield proxy


@contextmanager
def _served(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Where connections are taken, each in a thread of its own."""

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(there.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as there:
        threading.Thread(target=accept, daemon=True).start()
        yield there.getsockname()
        there.shutdown(socket.SHUT_RDWR)


def _called(port: int, ca: Path) -> bool:
    """Whether a node that calls a server there takes it for its own."""
    with suppress(httpx.TransportError), _client(port, ca) as client:
        client.ActivateNode(ActivateNodeRequest(heartbeat_interval=30))
        return True
    return False


def _client(port: int, ca: Path) -> FleetHttpClient:
    """What a SuperNode calls its SuperLink by."""
    return FleetHttpClient.from_server_address(f"127.0.0.1:{port}", False, str(ca), interceptors=[])


# -------------------------------------------------------------------- 16: clients that come and go, unstable links


class Flapping(Counting):
    """Resets every connection at each reply; as each round ends its links are down for two seconds, too."""

    cut = 0

    def replied(self, client: int) -> None:
        self.cut += sum(proxy.cut() for proxy in self.proxies)

    def scored(self, row: dict[str, Any]) -> None:
        super().scored(row)
        with ExitStack() as stack:
            for proxy in self.proxies:
                stack.enter_context(proxy.unplugged())
            time.sleep(2)


def flaps(rounds: int) -> list[Figure]:
    """Row 16: so many rounds of a deployment whose links break."""
    with tempfile.TemporaryDirectory() as name:
        experiment = small(rounds, engine="flower-deployment", round_timeout=60)
        seen = deploy(experiment, Path(name), watched_by=Flapping, node=KIND)
    left = [each for row in seen.rows for each in row.get("left_out", [])]
    done = len([row for row in seen.rows if row["round"] <= rounds])
    what = f"{seen.cut} connections of two nodes reset, links down for 2 s after each round"
    return [
        Figure(f"{what}: rounds done", f"{done} of {rounds}", "all", done == rounds),
        Figure("replies missed", f"{len(left)} of {2 * rounds}", "", None),
        *flat("the SuperLink and the run's server", seen.link[0], seen.link[rounds - 1]),
    ]


class ComingGrid(MemoryGrid):
    """In each round a fifth of the nodes, drawn anew, are away."""

    def get_node_ids(self) -> Iterable[int]:
        self._draw()
        return super().get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        self._draw()
        return super().get_nodes()

    def _draw(self) -> None:
        if self.round != self.drawn:
            self.drawn = self.round
            self.present = sorted(random.Random(self.round).sample(range(MANY), MANY * 4 // 5 if self.round else MANY))

    round, drawn = 0, -1


class _Rounds(fb.Watcher):
    """Tells the grid which round it is; what this process takes after each."""

    def __init__(self, grid: ComingGrid) -> None:
        self.grid, self.taken = grid, list[Taken]()

    def scored(self, row: dict[str, Any]) -> None:
        self.grid.round = row["round"]
        self.taken.append(taken(os.getpid(), started=False))


def comers(rounds: int) -> list[Figure]:
    """Row 16: so many rounds in which a fifth of the nodes is away, each time others."""
    method, task = fb.FedAvg(epochs=1, lr=0.1, batch=8), small_task(MANY)
    with tempfile.TemporaryDirectory() as name:
        grid = ComingGrid(client_app(method, task, Path(name)), MANY)
        seen = _Rounds(grid)
        settings = Settings(
            rounds=rounds, out=Path(name) / "run", evaluate_every=rounds, save_models=False, watcher=seen
        )
        policy = fb.Policy(round_timeout=30, connect_timeout=0.2)
        result = serve_run(grid, Run.of(method, task, settings, policy), exchange=Exchange(poll=0.002))
        answered = int((result.ledger.columns()["outcome"] == 0).sum())
    done = len([row for row in result.rounds if row["phase"] == "round"])
    what = f"a fifth of {MANY} nodes absent in each round, different ones each time: rounds done"
    return [
        Figure(what, f"{done} of {rounds}", "all", done == rounds),
        Figure("replies a round", f"{answered / rounds:.1f}", "", None),
        *flat("its process", seen.taken[rounds // 10], seen.taken[-1]),
    ]


def reconnections(nodes: int) -> list[Figure]:
    """Row 16: over how many seconds the calls of so many nodes come that lost a server at once, for ten seconds."""
    came = list[float]()

    def serve(plain: socket.socket) -> None:
        with suppress(OSError), plain:
            plain.recv(1 << 16)
            plain.sendall(YES)
            came.append(time.monotonic())

    def node() -> None:
        with httpx.Client(trust_env=False) as client:

            def call() -> httpx.Response:
                return client.post(f"http://127.0.0.1:{proxy.port}")

            if KIND == "resident":
                fleet._ask(call)
            else:
                retrying_more(make_simple_http_retry_invoker()).invoke(call)

    with _served(serve) as address, Proxy(*address) as proxy, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_node_key(folder, "a")
        write_certificates(folder / "certificates", [])
        ca, key = folder / "certificates" / "ca.crt", folder / "a"
        fleet = Fleet("127.0.0.1:1", ca, key, lambda _: None, NodeWatch("north", "127.0.0.1:1"), threading.Event())
        with proxy.unplugged():
            waiting = [threading.Thread(target=node, daemon=True) for _ in range(nodes)]
            for thread in waiting:
                thread.start()
            time.sleep(10)
        for thread in waiting:
            thread.join(60)
    came.sort()
    spread = came[round(0.95 * (len(came) - 1))] - came[round(0.05 * (len(came) - 1))] if came else 0.0
    what = f"{nodes} nodes whose server was away for 10 s: seconds over which the middle 90 % of {len(came)} reconnect"
    return [Figure(what, f"{spread:.1f} s", "at least 5 s", spread >= 5 and len(came) == nodes)]


# ------------------------------------------------------------------------------------- 17: slow and idle connections


class Crowding(Counting):
    """After the third round `count` sockets stay open beside the nodes': silent ones, with and without TLS, and some
    that send a byte a second of a request."""

    count = still = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.open = list[socket.socket]()
        self.before = self.after = Taken(0, 0, 0)

    def scored(self, row: dict[str, Any]) -> None:
        super().scored(row)
        if row["round"] == CALM:
            self.before = taken(self.pid, started=False)
            self._crowd()
            self.after = taken(self.pid, started=False)
            threading.Thread(target=self._drip, daemon=True).start()
        if row["round"] == 2 * CALM:
            self.still = sum(_is_open(each) for each in self.open)

    def _crowd(self) -> None:
        link = self.deployed.processes
        tls = _trusting(link)
        for i in range(self.count):
            here = socket.create_connection(_address(link), 30)
            if i % 3:
                here = tls.wrap_socket(here, server_hostname="127.0.0.1")
            self.open.append(here)

    def _drip(self) -> None:
        request = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Nothing: " + b"x" * 10_000
        for i in range(len(request)):
            time.sleep(1)
            for here in self.open[2::3]:
                with suppress(OSError):
                    here.sendall(request[i : i + 1])


CALM = 20 if KIND == "resident" else 3  # rounds before the sockets come; as many are beside them


def crowded(count: int) -> list[Figure]:
    """Row 17: so many idle and slow sockets to the SuperLink beside the nodes of a deployment."""
    kind = type("Crowding", (Crowding,), {"count": count})
    with tempfile.TemporaryDirectory() as name:
        experiment = small(2 * CALM + 1, engine="flower-deployment", round_timeout=120)
        seen = deploy(experiment, Path(name), watched_by=kind, node=KIND)
        for each in seen.open:
            each.close()
    took = [row["seconds"] - row["seconds_scoring"] for row in seen.rows]
    free, beside = statistics.median(took[1:CALM]), statistics.median(took[CALM + 1 : 2 * CALM])
    each = (seen.after.memory - seen.before.memory) * 1024 / count
    return [
        Figure(
            f"{count} sockets, a third each: silent, silent with TLS, 1 byte a second: a round of 2 nodes",
            f"{beside / free:.2f} times",
            "at most 1.2 times",
            beside <= 1.2 * free,
        ),
        Figure("memory of the SuperLink for each", f"{each:.0f} KiB", "at most 64 KiB", each <= 64),
        Figure(
            f"still open after {CALM} rounds: Flower's server closes no silent connection",
            str(seen.still),
            "",
            None,
        ),
    ]


class Stock(Processes):
    """Flower's own SuperLink, with all its doors open."""

    def superlink_command(self) -> list[str]:
        command = super().superlink_command()
        return ["flower-superlink", *command[command.index("--host") :]]


def idle(seconds: int) -> list[Figure]:
    """Row 17: what a node sends and receives that is asked for nothing, in so many seconds."""
    found = []
    for whose, kind in (("this package's", Processes), ("Flower's own", Stock)):
        with (
            tempfile.TemporaryDirectory() as name,
            kind(Path(name), "127.0.0.1:0", any_app=False, resident=KIND == "resident") as link,
            Proxy(*_address(link)) as proxy,
        ):
            link.start_superlink()
            link.register(["a"])
            link.start_node("a", {"partition-id": 0}, superlink=f"127.0.0.1:{proxy.port}")
            while link.node_status() != {"a": "online"}:
                time.sleep(0.5)
            time.sleep(10)
            before, since = sum(proxy.snapshot()), time.monotonic()
            time.sleep(seconds)
            rate = (sum(proxy.snapshot()) - before) / (time.monotonic() - since)
        what = f"an idle node of {whose} SuperLink in {seconds} s, both ways"
        found.append(Figure(what, f"{rate:.0f} B/s", "at most 350 B/s", rate <= 350))
    return found


def _is_open(here: socket.socket) -> bool:
    here.settimeout(0.01)
    try:
        return bool(here.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False
