"""What this package takes for granted of Flower beyond its public interface, all in one place.

Flower keeps its word for `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and `flwr.simulation`. Its environment
variables, commands and what they answer, logs, files and the rest of its modules may change with any version;
`tests/flower/test_compat.py` tells which have. So it is with Ray, of which Flower takes one version. Importing this
module imports neither.
"""

from __future__ import annotations

import base64
import importlib
import json
import re
import sqlite3
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fewbytes.base.errors import FewbytesError, UserError

if TYPE_CHECKING:
    from flwr.serverapp import Grid
    from flwr.supercore.retry import RetryInvoker

REQUIREMENT = "flwr>=1.40,<1.43"
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Flower phones home unless told not to before it is imported."""
ENVIRONMENT = {
    **QUIET,
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",  # seconds; a SuperLink starts little, and looks cost it time
    "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": "1800000",  # bytes at once; 5 MiB never pass a link that breaks every 2 MB
}
"""What Flower's processes are started with, but for what a user has set himself."""
SUPERNODE_ENVIRONMENT = {**ENVIRONMENT, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05"}
"""The same for a SuperNode, which starts a process for each message."""
HOME = "FLWR_HOME"
"""The variable that names the folder of a process's own files."""
LOGGER = "flwr"
COMMANDS = ("flower-superlink", "flower-supernode", "flwr")
GUARDED = ("-m", "fewbytes.flower.guarded")
"""What Python runs in place of the first two: `fewbytes.flower.guarded`."""
FLEET = "/v1/fleet/"
"""Below this path lies what nodes need of a SuperLink's port; the rest is for people and for its own processes."""
ASKED, CONFIRMED, LEFT = f"{FLEET}pull-messages", f"{FLEET}confirm-message-received", "/v1/runtime/push-messages"
"""The paths by which a node asks for messages, and says that it has one, and by which a run leaves messages."""
CONNECTION = "fewbytes"
"""What `flwr` calls the SuperLink that `connection_config` describes."""
DATABASE = "superlink.db"
DATABASE_FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
DATABASE_KEPT = ("node", "alembic_version")
"""The tables that outlive a deployment: its nodes, and of which version all tables are."""
RAY_BACKEND = "flwr.server.superlink.fleet.vce.backend.raybackend"
"""The module that runs a simulation on Ray."""
ALREADY_REGISTERED = "already in use"
"""What `failure` says of a node that cannot be registered because its key is."""
LOOK_SECONDS = 0.1  # between looks for the rest of a reply that is still being uploaded
APP_RAISED, NODE_UNAVAILABLE, APP_REFUSED = 2, 5, 7
"""Error codes: an application that raised something, a node that is gone, an application that may not run there."""
RAY_SECONDS = 5  # that a Ray cluster has to answer: of itself Ray waits for over a minute, then ends the process
ACTOR_SECONDS = 60.0  # that a message waits for an actor while there is none
ATTEMPTS = 3  # times a message may lose its actor


def look_often() -> None:
    """Have Flower look for the rest of a reply every LOOK_SECONDS as long as its upload lives: of itself it waits 1, 2,
    4, 8, 10 s, up to as long again as a slow link's upload took, and looks 500 times at most."""
    from flwr.supercore.inflatable import inflatable_utils

    defaults = getattr(inflatable_utils.pull_objects, "__kwdefaults__", None) or {}
    often = {"initial_backoff": LOOK_SECONDS, "backoff_cap": LOOK_SECONDS, "max_tries_per_object": None}
    defaults.update({name: value for name, value in often.items() if name in defaults})


def connected_nodes(grid: Grid) -> dict[int, str]:
    """The nodes that are connected: their ids, and the names they are registered by (empty: none)."""
    return {info.node_id: info.name for info in grid.get_nodes()}


# ------------------------------------------------------------------------------------------------------- the simulation


def ray_cluster(address: str) -> str:
    """Where the Ray cluster is, host:port, that `address`, the same or "auto", means. Raises UserError if none is, or
    this host has no part in it."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.services import canonicalize_bootstrap_address, get_node_to_connect_for_driver
    from ray.core.generated.gcs_service_pb2 import CheckAliveRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

    remedy = "give host:port of its head, as `ray start --head` prints it, or auto on one of its hosts"
    if not re.fullmatch(r"auto|[^/\s]+:[0-9]{1,5}", address):
        raise UserError(f"ray_address is where a Ray cluster is, not {address!r}: {remedy}")
    try:
        place = canonicalize_bootstrap_address(address)
        if place is None:
            raise UserError(f"no Ray cluster runs on this host: {remedy}")
        stub = NodeInfoGcsServiceStub(init_grpc_channel(place))
        stub.CheckAlive(CheckAliveRequest(), timeout=RAY_SECONDS, wait_for_ready=True)
    except (OSError, ValueError, grpc.RpcError):
        raise UserError(f"no Ray cluster answers at {address}: {remedy}") from None
    try:
        client = importlib.import_module("ray._raylet").GcsClient(address=place)
        get_node_to_connect_for_driver(client, timeout_seconds=RAY_SECONDS)
    except RuntimeError:
        raise UserError(f"this host has no part in the Ray cluster: `ray start --address={place}` here first") from None
    return str(place)


def lasting_pool(most: int) -> None:
    """Have a simulation use at most so many actors, and lose no message with one of them.

    What an actor that died was doing another one does, up to ATTEMPTS times; a new one takes its place where Ray finds
    room. Flower of itself gives the dead one the next messages, which fail, and a message also to an actor that has no
    room yet. Two messages to one client never run at once, also on two hosts.
    """
    import ray
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool
    from ray.exceptions import RayActorError

    class LastingPool(BasicActorPool):
        """Flower's pool: `pool` are its idle actors, `num_actors` counts those that work, too, and those to come."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.actors_capacity = min(self.actors_capacity, most)
            self._coming: dict[Any, Any] = {}  # actors by the object that is there when they are
            self._changed = threading.Condition()
            self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by client

        def add_actors_to_pool(self, num_actors: int) -> None:
            with self._changed:
                self._await([self._new() for _ in range(num_actors)])
                self.num_actors += num_actors

        def _new(self) -> Any:
            create: Any = self.create_actor_fn
            return create()

        def _await(self, actors: list[Any]) -> None:
            self._coming |= {actor.__ray_ready__.remote(): actor for actor in actors}

        def submit(self, actor_fn: Any, job: Any) -> Any:
            return actor_fn, job  # by the next, which may have to do it again

        def fetch_result_and_return_actor_to_pool(self, future: Any) -> Any:
            actor_fn, job = future
            with self._turns[job[2]]:
                for _ in range(ATTEMPTS - 1):
                    with suppress(RayActorError):
                        return self._done(actor_fn, job)
                return self._done(actor_fn, job)

        def _done(self, actor_fn: Any, job: Any) -> Any:
            """What comes of a job on an idle actor, which is idle again afterwards unless it has died."""
            actor = self._idle()
            try:
                _, message, context = ray.get(actor_fn(actor, *job))
            except RayActorError:
                ray.kill(actor)  # if it is only out of reach
                with self._changed:  # idle ones may have died with it
                    self._await([self._new(), *self.pool])
                    self.pool.clear()
                raise
            except BaseException:
                self._give_back(actor)
                raise
            self._give_back(actor)
            return message, context

        def _give_back(self, actor: Any) -> None:
            with self._changed:
                self.pool.append(actor)
                self._changed.notify()

        def add_actor_back_to_pool(self, future: Any) -> None:
            pass  # it is back

        def _arrive(self, word: Any, actor: Any) -> None:
            try:
                ray.get(word)
                self.pool.append(actor)
            except RayActorError:
                self._await([self._new()])

        def _idle(self) -> Any:
            """An actor that is alive and has nothing to do. Raises FewbytesError where there is none."""
            with self._changed:
                deadline = time.monotonic() + ACTOR_SECONDS
                while True:
                    if self._coming:
                        there, _ = ray.wait(list(self._coming), num_returns=len(self._coming), timeout=0)
                        for each in there:
                            self._arrive(each, self._coming.pop(each))
                    if self.pool:
                        return self.pool.pop()
                    if self.num_actors > len(self._coming):
                        deadline = time.monotonic() + ACTOR_SECONDS  # somebody works
                    elif time.monotonic() > deadline:
                        raise FewbytesError(f"no host of the Ray cluster had a free processor for {ACTOR_SECONDS:g} s")
                    self._changed.wait(0.1)

    _replaced(importlib.import_module(RAY_BACKEND), "BasicActorPool", LastingPool)


# ------------------------------------------------------------------------------------------------- commands and files


def superlink_command(host: str, port: int, certificates: Path, database: Path | None, token: Path) -> list[str]:
    """A SuperLink's command line: TLS, only registered nodes, commands from who knows what the file `token` holds.

    `database`: where it keeps its nodes and what passes through it (None: in memory, which takes a fifth of the time).
    """
    return [
        sys.executable, *GUARDED, "superlink", str(token),
        "--host", host, "--port", str(port), "--enable-supernode-auth",
        "--ssl-ca-certfile", f"{certificates}/ca.crt", "--ssl-certfile", f"{certificates}/server.pem",
        "--ssl-keyfile", f"{certificates}/server.key", *([] if database is None else ["--database", str(database)]),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip


def supernode_command(
    superlink: str,
    port: int,
    ca: Path,
    private_key: Path,
    node_config: Mapping[str, str | int],
    guarded_by: str | None = None,
) -> list[str]:
    """A SuperNode's command line. Raises UserError for a value of its configuration that Flower cannot take.

    `superlink`: host:port; `port`: a loopback port of its own; `ca`: the certificate that proves the SuperLink;
    `guarded_by`: the Python that has it run this package's application only.
    """
    return [
        *(["flower-supernode"] if guarded_by is None else [guarded_by, *GUARDED, "supernode"]),
        "--superlink", superlink, "--port", str(port), "--root-certificates", str(ca),
        "--auth-supernode-private-key", str(private_key),
        "--node-config", " ".join(f"{key}={_toml(key, value)}" for key, value in node_config.items()),
    ]  # fmt: skip


def _toml(key: str, value: str | int) -> str:
    """A value as --node-config reads it: TOML, where a quote ends at the next of its kind."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", key):
        raise UserError(f"node configuration: {key!r} is no key (letters, digits, '_', '-', '.')")
    if not isinstance(value, str):
        return str(value).lower()
    if not value.isprintable() or ("'" in value and '"' in value):
        raise UserError(f"node configuration: {key} has both kinds of quotes or a control character: {value!r}")
    return f"'{value}'" if "'" not in value else '"{}"'.format(value.replace("\\", "\\\\"))


def register_command(public_key: Path, name: str) -> list[str]:
    """The command that registers a node."""
    return ["flwr", "supernode", "register", str(public_key), CONNECTION, "--name", name]


def list_nodes_command() -> list[str]:
    """The command that lists the registered nodes."""
    return ["flwr", "supernode", "ls", CONNECTION]


def submit_command(app: Path) -> list[str]:
    """The command that submits an app."""
    return ["flwr", "run", str(app), CONNECTION]


def run_status_command(run: int) -> list[str]:
    """The command that says what has become of a run."""
    return ["flwr", "ls", CONNECTION, "--run-id", str(run)]


def stop_command(run: int) -> list[str]:
    """The command that stops a run."""
    return ["flwr", "stop", str(run), CONNECTION]


def connection_config(address: str, ca: Path) -> tuple[str, str]:
    """Name and text of the file in HOME that says where the SuperLink is."""
    connection = {"address": address, "root-certificates": str(ca)}
    return "config.toml", tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: connection}})


def purge(database: Path) -> None:
    """Leave nothing of messages, runs and applications in a SuperLink's database, nor in what is free of its file."""
    if database.exists():
        with closing(sqlite3.connect(database, isolation_level=None)) as there:
            there.execute("pragma secure_delete = on")
            tables = [name for (name,) in there.execute("select name from sqlite_master where type = 'table'")]
            for name in tables:
                if name not in DATABASE_KEPT and not name.startswith("sqlite_"):
                    there.execute(f'delete from "{name}"')
            there.execute("vacuum")
            there.execute("pragma wal_checkpoint(truncate)")


def credentials(address: str, token: str) -> tuple[str, str]:
    """Name and text of the file in HOME by which `flwr` shows the SuperLink at that address the token."""
    said = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": "none"}
    lines = (
        f"flower.account-auth.{address}.{key}: {base64.b64encode(value.encode()).decode()}\n"
        for key, value in said.items()
    )
    return "credentials.yaml", "".join(lines)


def app_config(server: str, client: str, run_config: Mapping[str, Any]) -> str:
    """The pyproject.toml of an app; its components are named `module:attribute`."""
    described = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": "fewbytes-run", "version": "1.0.0", "description": "A run of fewbytes",
            "license": {"file": "LICENSE"},
            "dependencies": [REQUIREMENT, "fewbytes"],
        },
        "tool": {"flwr": {"app": {
            "publisher": "fewbytes", "fab-format-version": 1, "flwr-version-target": "1.40.0",
            "components": {"serverapp": server, "clientapp": client},
            "config": dict(run_config),
        }}},
    }  # fmt: skip
    return tomli_w.dumps(described)


# ----------------------------------------------------------------------------------------------- what runs them guarded


def run_superlink(secret: Path, gate: Callable[..., Any], knows: Callable[[str | bytes | None], bool]) -> None:
    """`flower-superlink`, its application within `gate(app, FLEET, is_node)`; who sends a command must be one that
    `knows`.

    The processes that carry out its tasks show it what the file `secret` holds. Raises AttributeError where Flower
    has changed, rather than run without.
    """
    from flwr.common.constant import ACCESS_TOKEN_KEY
    from flwr.superlink import extensions
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
    from starlette.middleware import Middleware

    command = importlib.import_module("flwr.superlink.cli.flower_superlink")

    class OneAccount(NoOpControlAuthnPlugin):
        """The account there always is, for who shows the token."""

        def validate_tokens_in_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[bool, Any]:
            if not knows(dict(metadata).get(ACCESS_TOKEN_KEY)):
                return False, None
            return super().validate_tokens_in_metadata(metadata)

        def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[Any, Any]:
            return None, None

    def gated(app: Callable[..., Any]) -> Callable[..., Any]:
        inner = gate(app, FLEET, is_node)

        async def serve(scope: dict[str, Any], receive: Any, send: Any) -> None:
            if "app" in scope:
                scope["app"].state.superexec_auth_secret = secret.read_bytes()
            await inner(scope, receive, send)

        return serve

    def with_secret(*arguments: Any, **options: Any) -> list[str]:
        return [*starting(*arguments, **options), "--superexec-auth-secret-file", str(secret)]

    starting = _replaced(command, "_get_superexec_command", with_secret)
    _replaced(command, "load_control_authn_plugin", OneAccount)
    _replaced(extensions, "get_middleware", lambda: (Middleware(gated),))
    command.flower_superlink()


def is_node(scope: Mapping[str, Any]) -> bool:
    """Whether a request to the SuperLink is signed with the key of a registered node, by its headers alone."""
    from fastapi import HTTPException
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
    from flwr.superlink.dependencies.linkstate import get_linkstate
    from flwr.superlink.routers.fleet.node_auth import authenticate_node
    from starlette.requests import Request

    request = Request({**scope, "state": {}})
    try:
        key = base64.b64decode(request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        request.state.protobuf_request = ActivateNodeRequest(public_key=key)  # any that claims no more than the key
        authenticate_node(request)
    except (KeyError, ValueError, HTTPException):
        return False
    return get_linkstate(request).get_node_id_by_public_key(key) is not None


def node_of(body: bytes) -> int:
    """Which node asks for messages. Raises ValueError for a body that does not say."""
    from flwr.proto.fleet_pb2 import PullMessagesRequest

    return int(_parsed(PullMessagesRequest, body).node.node_id)


def message_in(body: bytes) -> str:
    """Which message an answer holds; empty for none."""
    from flwr.proto.fleet_pb2 import PullMessagesResponse

    trees = _parsed(PullMessagesResponse, body).message_object_trees
    return str(trees[0].object_id) if trees else ""


def confirmed(body: bytes) -> tuple[int, str]:
    """Which node confirms which message. Raises ValueError for a body that does not say."""
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

    said = _parsed(ConfirmMessageReceivedRequest, body)
    return int(said.node.node_id), str(said.message_object_id)


def nodes_for(body: bytes) -> list[int]:
    """For which nodes a run leaves messages. Raises ValueError for a body that does not say."""
    from flwr.proto.runtime_pb2 import PushAppMessagesRequest

    return [each.metadata.dst_node_id for each in _parsed(PushAppMessagesRequest, body).messages_list]


def _parsed(kind: Any, body: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise ValueError(str(error)) from None


def run_supernode(is_installed: Callable[[bytes], bool]) -> None:
    """`flower-supernode` that runs only applications whose bundles are what is installed here, and bears bad links.

    Raises AttributeError where Flower has changed, rather than run without.
    """
    from flwr.supercore.fab import Fab

    module = importlib.import_module("flwr.supernode.start_client_internal")

    def pull(*, get_fab: Callable[[str, int], Fab], trusted_entities: object, **others: Any) -> Any:
        def checked(digest: str, run: int) -> Fab:
            fab = get_fab(digest, run)
            return Fab(fab.hash_str, fab.content, {"valid_license": "installed"} if is_installed(fab.content) else {})

        return pulling(get_fab=checked, trusted_entities={"installed": ""}, **others)

    pulling = _replaced(module, "_pull_and_store_message", pull)
    _replaced(module, "_verify_fab", lambda fab, _: is_installed(fab.content))
    connection = importlib.import_module("flwr.supernode.fleet_http_connection")
    retrying = connection.make_simple_http_retry_invoker
    _replaced(connection, "make_simple_http_retry_invoker", lambda: bearing_bad_links(retrying()))
    importlib.import_module("flwr.supernode.cli.flower_supernode").flower_supernode()


def bearing_bad_links(invoker: RetryInvoker) -> RetryInvoker:
    """What calls the SuperLink and tries again: also where a link broke off, or damaged, what TLS carries.

    Flower of itself tries again after other breaks, but takes these for a wrong certificate: the message that was
    being fetched is lost, and the server waits for its reply in vain.
    """
    import httpx

    gives_up = invoker.should_giveup

    def hopeless(error: Exception) -> bool:
        broken = isinstance(error, httpx.TransportError) and "certificate" not in str(error).lower()
        return not broken and gives_up is not None and gives_up(error)

    invoker.should_giveup = hopeless
    return invoker


def _replaced(module: Any, name: str, by: Any) -> Any:
    """Put another thing in a thing's place; the thing that was there. Raises AttributeError if there is none."""
    before = getattr(module, name)
    setattr(module, name, by)
    return before


# ----------------------------------------------------------------------------------------------- answers and last words


def flwr_commands() -> Callable[[Sequence[str]], object]:
    """What runs a `flwr` command's arguments in this process. It may end with SystemExit."""
    from flwr.cli.app import app

    return app


def in_json(command: Sequence[str]) -> list[str]:
    """A `flwr` command that answers with JSON."""
    return [*command, "--format", "json"]


def read_answer(output: bytes) -> dict[str, Any]:
    """What a command `in_json` answered. Its exit code tells nothing: most failures' is 0."""
    with suppress(ValueError):
        return dict(json.loads(output[output.index(b"{") :]))
    return {"error-message": plain(output)}


def failure(answer: Mapping[str, Any]) -> str:
    """Why a command failed in one line, without Flower's lines about what it is doing; empty if it did not."""
    if answer.get("success"):
        return ""
    lines = [line.strip("│╭╰╮╯─ ") for line in str(answer.get("error-message", answer)).splitlines()]
    return " ".join(line for line in lines if line and not re.match(r"Using SuperLink:|.*\.\.\.$", line))


def registered_id(answer: Mapping[str, Any]) -> str:
    """The id of the node that was registered."""
    return str(answer["node-id"])


def node_statuses(answer: Mapping[str, Any]) -> dict[str, str]:
    """The registered nodes by id: "registered" (never seen yet), "online" or "offline"."""
    return {node["node-id"]: str(node["status"]) for node in answer["nodes"] if node["status"] != "unregistered"}


def run_id(answer: Mapping[str, Any]) -> int:
    """The id of the run that was submitted."""
    return int(answer["run-id"])


def run_status(answer: Mapping[str, Any]) -> tuple[str, str]:
    """A run's status (pending, starting, running, finished:completed, …:failed, …:stopped) and details."""
    (row,) = answer["runs"]
    return row["status"], "" if row["status-details"] == "N/A" else row["status-details"]


def last_words(log: bytes) -> str:
    """Why a process ended, by its log: Flower's exit message, the last error or, failing all that, the last line."""
    text = plain(log)
    if exits := re.findall(r"Exit Code: \d+\n(.+?)(?:\n\n|\Z)", text, re.DOTALL):
        return " ".join(exits[-1].split())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\bERROR\b|^[\w.]+(Error|Exception)\b|: error: ", line)]
    return (errors or lines or ["it said nothing"])[-1]


def plain(text: bytes) -> str:
    """Text without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text.decode(errors="replace"))
