"""What a deployment withstands: replays, strangers, clocks, names from elsewhere, and what lies around afterwards."""

from __future__ import annotations

import datetime
import json
import logging
import ssl
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import closing, suppress
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any
from unittest import mock

from figures import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.hazmat.primitives.serialization.ssh import load_ssh_private_key
from flower_grid import Exchanges, left_out, run
from flwr.app import Message
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.node_pb2 import Node
from safetensors.torch import save

import fewbytes as fb
from fewbytes.experiments import app
from fewbytes.flower.messages import read_content, seal_of, write_content
from fewbytes.flower.processes import Processes
from fewbytes.wire.frame import MAGIC, MAJOR

logging.getLogger("flwr").setLevel(logging.CRITICAL)
HOUR = 3600  # seconds
VERSION = {"Content-Type": "application/protobuf"}


class Replayer(Exchanges):
    """Client 1 answers with what it said before: whole, and as the frame of an earlier reply beside today's words."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def __call__(self, message: Message, reply: Message) -> list[Message]:
        if not (before := self.before(message, reply)):
            return [reply]
        self.given += 1
        old = before[self.given % len(before)][1].content
        (words, new), frame = read_content(reply.content), bytes(read_content(old)[1])
        mixed = write_content(words, frame, seal=seal_of(reply.content))
        return [Message(old if self.given % 2 or bytes(new) == frame else mixed, reply_to=message)]


class Stop(fb.Watcher):
    """Ends a run after its third round."""

    def scored(self, row: dict[str, Any]) -> None:
        if row["round"] == 3:
            raise RuntimeError


def replays(count: int) -> list[Figure]:
    """Row 8: so many replies that a client sent before, not new ones; also after a restart and in another run."""
    policy = fb.Policy(round_timeout=30, connect_timeout=30, min_replies=0.25, strikes=1_000_000)
    given = refused = number = 0
    with tempfile.TemporaryDirectory() as name:
        while given < count:
            method, replayer = ("fedpurin", "fedkd", "feddistill")[number % 3], Replayer()
            folders = [Path(name) / f"{number}-{where}" / "run" for where in ("one", "another")]
            how: dict[str, Any] = {"fault": replayer, "policy": policy, "rounds": 20}
            with suppress(RuntimeError):
                run(method, folders[0], **how, watcher=Stop())
            run(method, folders[0], **how, resume=True)
            run(method, folders[1], **how)
            left = [each[1:] for folder in folders for each in left_out(folder)]
            refused += left.count((1, "rejected"))
            given, number = given + replayer.given, number + 1
    return [Figure("replays accepted", f"{given - refused} of {given}", "0", given == refused)]


def unauthenticated(times: int) -> list[Figure]:
    """Row 9: requests to a real SuperLink of who may not make them, each so many times; and a stranger's commands."""
    with tempfile.TemporaryDirectory() as name, Processes(Path(name), "127.0.0.1:0") as link:
        link.start_superlink()
        link.register(["a", "b"])
        ids = link.node_ids()
        keys = {who: load_ssh_private_key((link.folder / "keys" / who).read_bytes(), None) for who in ids}
        stranger = ec.generate_private_key(ec.SECP384R1())
        kinds: dict[str, Callable[[], int]] = {
            "no key": lambda: _ask(link, ids["a"], {}),
            "a key that is not registered": lambda: _ask(link, ids["a"], _signed(stranger, stranger)),
            "another node's id": lambda: _ask(link, ids["b"], _signed(keys["a"], keys["a"])),
            "another's key, signed by one's own": lambda: _ask(link, ids["a"], _signed(stranger, keys["a"])),
            "signed an hour ago": lambda: _ask(link, ids["a"], _signed(keys["a"], keys["a"], ago=HOUR)),
            "a command without the token": lambda: _command(link, {}),
            "a command with another token": lambda: _command(link, {"Authorization": "Bearer " + "0" * 64}),
            "the server's task without the secret": lambda: _command(link, {}, "/v1/runtime/acquire-task"),
        }
        own = _ask(link, ids["a"], _signed(keys["a"], keys["a"]))
        assert own == 200, f"the node itself is refused ({own}): this measures nothing"
        taken = {kind: sum(ask() == 200 for _ in range(times)) for kind, ask in kinds.items()}
    return [Figure(f"accepted: {kind}", f"{n} of {times}", "0", not n) for kind, n in taken.items()]


def _signed(by: Any, of: Any, ago: int = 0) -> dict[str, str]:
    """A node's headers: its key, and the time signed by a key."""
    then = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=ago)).isoformat()
    key = of.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signature = by.sign(then.encode(), ec.ECDSA(SHA256()))
    words = {"flwr-public-key": b64encode(key).decode(), "flwr-signature": b64encode(signature).decode()}
    return words | {"flwr-timestamp": then}


def _ask(link: Processes, node: str, headers: dict[str, str]) -> int:
    """The status of a node's question for messages."""
    body = PullMessagesRequest(node=Node(node_id=int(node))).SerializeToString()
    return _command(link, headers, "/v1/fleet/pull-messages", body)


def _command(link: Processes, headers: dict[str, str], path: str = "/v1/control/list-runs", body: bytes = b"") -> int:
    host, port = link.address.split(":")
    tls = ssl.create_default_context(cafile=link.folder / "certificates" / "ca.crt")
    with closing(HTTPSConnection(host, int(port), timeout=30, context=tls)) as connection:
        connection.request("POST", path, body, VERSION | headers)
        return connection.getresponse().status


def clock(_: int) -> list[Figure]:
    """Row 12: a run whose clock goes back, then on, by an hour at every reply; and one that goes on an hour earlier."""
    at, now, now_ns = [0], time.time, time.time_ns
    ahead = mock.patch.multiple(time, time=lambda: now() + at[0], time_ns=lambda: now_ns() + at[0] * 10**9)

    def jump(message: Message, reply: Message) -> list[Message]:
        at[0] = HOUR if at[0] <= 0 else -HOUR
        return [reply]

    with tempfile.TemporaryDirectory() as name, ahead:
        policy = fb.Policy(round_timeout=30, connect_timeout=30)
        run("fedpurin", Path(name) / "jumps" / "run", policy=policy, rounds=10, fault=jump)
        at[0] = 0
        with suppress(RuntimeError):
            run("fedpurin", Path(name) / "back" / "run", policy=policy, rounds=10, watcher=Stop())
        at[0] = -HOUR
        run("fedpurin", Path(name) / "back" / "run", policy=policy, rounds=10, resume=True)
        late = len(left_out(Path(name) / "jumps" / "run"))
        refused = len(left_out(Path(name) / "back" / "run"))
    return [
        Figure("replies counted as late because a clock jumps an hour", f"{late} of 40", "0", not late),
        Figure("orders refused when a run resumes an hour earlier", f"{refused} of 28", "0", not refused),
    ]


def names(_: int) -> list[Figure]:
    """Code and folders that a model's file, or a server, names: whether any of it is imported or listed."""
    imported = listed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").mkdir()
        (folder / "secret" / "patient").mkdir(parents=True)
        (folder / "theirs.py").write_text(f"import pathlib\npathlib.Path({str(folder / 'mark')!r}).touch()\n")
        sys.path.insert(0, name)
        code = ("theirs:net", "theirs:net@4", "theirs:net+mlp", "theirs:a b")
        for each in code:
            about = {"model": each, "sample_shape": [1, 8, 8], "classes": 10, "seed": 0}
            file = save({"w": torch.zeros(1)}, metadata={"fewbytes": json.dumps(about)})
            (folder / "models" / "global.safetensors").write_bytes(file)
            _refused(lambda: fb.load_model(folder))
        base = {"method": "fedavg", "clients": 1, "rounds": 1, "parameters.epochs": 1}
        sent = [{key: value} for key in ("model", "method", "dataset", "public") for value in code]
        for settings in sent:
            _refused(lambda settings=settings: app._serve_client(base | settings, {"partition-id": 0}))
        imported = (folder / "mark").exists()
        places = (f"{name}/secret", name, "..", ".", "/")
        for key in ("dataset", "public", "tokenizer", "weights"):
            for place in places:
                said = _refused(
                    lambda key=key, place=place: app._serve_client(base | {key: place}, {"partition-id": 0})
                )
                listed += "patient" in said
        sys.path.remove(name)
    return [
        Figure(
            f"code imported, of {len(code) + len(sent)} kinds that a file or a server names",
            "some" if imported else "none",
            "none",
            not imported,
        ),
        Figure("folders that a server names and a node lists", f"{listed} of {4 * len(places)}", "0", not listed),
    ]


def _refused(doing: Callable[[], object]) -> str:
    """What it is refused with; nothing if it is not."""
    try:
        doing()
    except fb.UserError as error:
        return str(error)
    return ""


def kept(_: int) -> list[Figure]:
    """What a deployment on this machine leaves: files of its SuperLink with frames, and files that others can read."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)  # as a home directory may be
        command = [sys.executable, "-m", "fewbytes", "deploy", "fedavg", "--clients", "2", "--rounds", "1"]
        subprocess.run([*command, "--out", name], check=True, capture_output=True)
        (folder,) = Path(name).iterdir()
        frame = MAGIC + bytes([MAJOR])
        files = [path for path in (folder / "deployment").rglob("*") if path.is_file() and frame in path.read_bytes()]
        open_to_all = [path for path in folder.iterdir() if path.stat().st_mode & 0o077]
        private = [path.name for path in open_to_all if path.name in ("checkpoint", "deployment", "models", "frames")]
    return [
        Figure("files of the deployment that still hold a message", str(len(files)), "0", not files),
        Figure("folders of states, models and keys that others can enter", str(len(private)), "0", not private),
    ]
