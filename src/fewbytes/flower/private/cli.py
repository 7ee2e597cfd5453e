"""Commands of `flwr`, and their answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fewbytes.flower.private.programs import plain

CONNECTION = "fewbytes"
"""`flwr`'s name for the SuperLink of `fewbytes.flower.private.files.connection_config`."""
ALREADY_REGISTERED = "already in use"
"""Part of `failure` for a node whose key is already registered."""


def flwr_commands() -> Callable[[Sequence[str]], object]:
    """A function that runs a `flwr` command's arguments in this process. It may raise SystemExit."""
    from flwr.cli.app import app

    return app


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
