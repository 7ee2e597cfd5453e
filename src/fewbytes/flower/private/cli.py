"""Commands of `flwr`, and their answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fewbytes.base.errors import one_line
from fewbytes.flower.private.programs import plain

CONNECTION = "fewbytes"
"""`flwr`'s name for the SuperLink of `fewbytes.flower.private.files.connection_config`."""
ALREADY_REGISTERED = "already in use"
"""Part of `failure` for a key that is registered, or was: the SuperLink never accepts a removed key again."""


class Registered(NamedTuple):
    """A node that the SuperLink knows: its id and name, its public key in PEM, and its status: "registered" (never seen
    yet), "online" or "offline"."""

    id: str
    name: str
    key: str
    status: str


def flwr_commands() -> Callable[[Sequence[str]], object]:
    """A function that runs a `flwr` command's arguments in this process. It may raise SystemExit.

    Its list of nodes has names and keys, which `flwr` leaves out of its own."""
    from flwr.cli.app import app

    return lambda arguments: _list_nodes() if list(arguments[:2]) == ["supernode", "ls"] else app(arguments)


def _list_nodes() -> None:
    """Print the nodes that the SuperLink knows, with their names and keys, as JSON."""
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.utils import init_http_client_from_connection
    from flwr.proto.control_pb2 import ListNodesRequest

    try:
        client = init_http_client_from_connection(read_superlink_connection(CONNECTION))
        try:
            found = client.ListNodes(ListNodesRequest()).nodes_info
        finally:
            client.close()
    except Exception as error:
        print(json.dumps({"error-message": one_line(error)}))
        return
    nodes = [Registered(str(node.node_id), node.name, node.public_key.decode(), node.status) for node in found]
    print(json.dumps({"success": True, "nodes": nodes}))


def register_command(public_key: Path, name: str) -> list[str]:
    """The command that registers a node."""
    return ["flwr", "supernode", "register", str(public_key), CONNECTION, "--name", name]


def unregister_command(node: str) -> list[str]:
    """The command that removes a node, by its id. Its key is not accepted again."""
    return ["flwr", "supernode", "unregister", node, CONNECTION]


def list_nodes_command() -> list[str]:
    """The command that lists the registered nodes."""
    return ["flwr", "supernode", "ls", CONNECTION]


def submit_command(app: Path) -> list[str]:
    """The command that submits an app."""
    return ["flwr", "run", str(app), CONNECTION]


def run_status_command(run: int) -> list[str]:
    """The command that prints a run's status."""
    return ["flwr", "ls", CONNECTION, "--run-id", str(run)]


def stop_command(run: int) -> list[str]:
    """The command that stops a run."""
    return ["flwr", "stop", str(run), CONNECTION]


def in_json(command: Sequence[str]) -> list[str]:
    """A `flwr` command that answers with JSON."""
    return [*command, "--format", "json"]


def read_answer(output: bytes) -> dict[str, Any]:
    """The answer of a command `in_json`. Its exit code is useless: 0 for most failures."""
    with suppress(ValueError):
        return dict(json.loads(output[output.index(b"{") :]))
    return {"error-message": plain(output)}


def failure(answer: Mapping[str, Any]) -> str:
    """Why a command failed in one line, without Flower's lines about what it is doing; empty if it did not."""
    if answer.get("success"):
        return ""
    lines = [line.strip("│╭╰╮╯─ ") for line in str(answer.get("error-message", answer)).splitlines()]
    return " ".join(line for line in lines if line and not re.match(r"Using SuperLink:|.*\.\.\.$", line))


def registered(answer: Mapping[str, Any]) -> list[Registered]:
    """The registered nodes."""
    return [node for node in (Registered(*row) for row in answer["nodes"]) if node.status != "unregistered"]


def run_id(answer: Mapping[str, Any]) -> int:
    """The id of the run that was submitted."""
    return int(answer["run-id"])


def run_status(answer: Mapping[str, Any]) -> tuple[str, str]:
    """A run's status (pending, starting, running, finished:completed, …:failed, …:stopped) and details."""
    (row,) = answer["runs"]
    return row["status"], "" if row["status-details"] == "N/A" else row["status-details"]
