"""Flower's programs: the environment they start in, their command lines, and why they ended."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fewbytes.base.errors import UserError

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Variables that disable Flower's telemetry and update check; set before it is imported."""
ENVIRONMENT = {
    **QUIET,
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",  # seconds; a SuperLink starts little, and looks cost it time
    "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE": "1800000",  # bytes at once; 5 MiB never pass a link that breaks every 2 MB
}
"""The environment of Flower's processes; variables that the user has set take precedence."""
SUPERNODE_ENVIRONMENT = {**ENVIRONMENT, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05"}
"""The same for a SuperNode, which starts a process for each message."""
HOME = "FLWR_HOME"
"""The variable that names the folder of a process's own files."""
LOGGER = "flwr"
COMMANDS = ("flower-superlink", "flower-supernode", "flwr")
LAUNCHER = "flower-superexec"  # which the SuperLink starts, and which starts or becomes SERVER
SERVER = "flwr-serverapp"
"""The name of the process that runs a run's server."""
GUARDED = ("-m", "fewbytes.flower.guarded")
"""Python's arguments to run `fewbytes.flower.guarded` in place of the first two commands, and of the launcher."""


class Local(NamedTuple):
    """How programs of the SuperLink's machine use it: the file of the token that commands need, its address there
    (host:port), and the certificate that proves it there. `many`: whether several runs may come, one after another;
    else the launcher becomes the server of the first."""

    token: Path
    address: str
    ca: Path
    many: bool = False


def superlink_command(host: str, port: int, certificates: Path, database: Path | None, local: Local) -> list[str]:
    """A SuperLink's command line: TLS, only registered nodes, commands only with the content of the token's file.

    `database`: where it keeps its nodes and what passes through it (None: in memory, which takes a fifth of the time).
    """
    return [
        sys.executable, *GUARDED, "superlink", str(local.token), local.address, *(["many"] if local.many else []),
        "--host", host, "--port", str(port), "--enable-supernode-auth",
        "--ssl-ca-certfile", str(local.ca), "--ssl-certfile", f"{certificates}/server.pem",
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
        raise UserError(f"node configuration: {key!r} is not a key (letters, digits, '_', '-', '.')")
    if not isinstance(value, str):
        return str(value).lower()
    if not value.isprintable() or ("'" in value and '"' in value):
        raise UserError(f"node configuration: {key} has both kinds of quotes or a control character: {value!r}")
    return f"'{value}'" if "'" not in value else '"{}"'.format(value.replace("\\", "\\\\"))


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
