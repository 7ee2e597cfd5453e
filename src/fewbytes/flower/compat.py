"""What this package takes for granted of Flower's processes: environment, commands and their answers, files, logs.

Flower keeps its word for `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and `flwr.simulation`; all else may change with
any version, and `tests/flower/test_compat.py` tells what has. It stands here and, of what runs inside Flower's
processes, in `inside`, of its Fleet API in `fleet`, of its simulation in `actors`. Importing this imports no flwr.
"""

from __future__ import annotations

import base64
import json
import re
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fewbytes.base.errors import UserError

if TYPE_CHECKING:
    from flwr.app import Error
    from flwr.serverapp import Grid

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
LAUNCHER = "flower-superexec"  # which the SuperLink starts, and which starts SERVER
SERVER = "flwr-serverapp"
"""What the process is called that runs a run's server."""
GUARDED = ("-m", "fewbytes.flower.guarded")
"""What Python runs in place of the first two: `fewbytes.flower.guarded`."""
CONNECTION = "fewbytes"
"""What `flwr` calls the SuperLink that `connection_config` describes."""
DATABASE = "superlink.db"
DATABASE_FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
DATABASE_KEPT = ("node", "alembic_version")
"""The tables that outlive a deployment: its nodes, and of which version all tables are."""
ALREADY_REGISTERED = "already in use"
"""What `failure` says of a node that cannot be registered because its key is."""
LOOK_SECONDS = 0.1  # between looks for the rest of a reply that is still being uploaded
APP_RAISED, NOT_THERE, NODE_UNAVAILABLE, APP_REFUSED = 2, 3, 5, 7
"""Error codes: an application that raised something, a message, or the rest of one, that is not there, a node that is
gone, an application that may not run there."""


def look_often() -> None:
    """Have Flower look for the rest of a reply every LOOK_SECONDS as long as its upload lives: of itself it waits 1, 2,
    4, 8, 10 s, up to as long again as a slow link's upload took, and looks 500 times at most."""
    from flwr.supercore.inflatable import inflatable_utils

    defaults = getattr(inflatable_utils.pull_objects, "__kwdefaults__", None) or {}
    often = {"initial_backoff": LOOK_SECONDS, "backoff_cap": LOOK_SECONDS, "max_tries_per_object": None}
    defaults.update({name: value for name, value in often.items() if name in defaults})


def away(error: Error) -> str:
    """In which way a node is away, where an error says that; nothing where it says something else."""
    if error.code == NODE_UNAVAILABLE:
        return "its node has gone, or has been silent for a minute"
    if error.code == NOT_THERE and "upload" in (error.reason or ""):
        return "its reply broke off three minutes ago: its node has gone"
    return ""


def connected_nodes(grid: Grid) -> dict[int, str]:
    """The nodes that are connected: their ids, and the names they are registered by (empty: none)."""
    return {info.node_id: info.name for info in grid.get_nodes()}


def replaced(module: Any, name: str, by: Any) -> Any:
    """Put another thing in a thing's place; the thing that was there. Raises AttributeError if there is none."""
    before = getattr(module, name)
    setattr(module, name, by)
    return before


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
