"""Files of Flower's programs: where `flwr` finds the SuperLink and its token, and the SuperLink's database."""

from __future__ import annotations

import base64
import sqlite3
from contextlib import closing
from pathlib import Path

import tomli_w

from fewbytes.flower.private.cli import CONNECTION

DATABASE = "superlink.db"
DATABASE_FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
DATABASE_KEPT = ("node", "alembic_version")
"""The tables that outlive a deployment: its nodes, and the schema's version."""


def connection_config(address: str, ca: Path) -> tuple[str, str]:
    """Name and text of the file in HOME with the SuperLink's address."""
    connection = {"address": address, "root-certificates": str(ca)}
    return "config.toml", tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: connection}})


def purge(database: Path) -> None:
    """Erase messages, runs and applications from a SuperLink's database, also from its file's free pages."""
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
    """Name and text of the file in HOME with `flwr`'s token for the SuperLink at that address."""
    entries = {"authn-type": "oidc", "oidc-access-token": token, "oidc-refresh-token": "none"}
    lines = (
        f"flower.account-auth.{address}.{key}: {base64.b64encode(value.encode()).decode()}\n"
        for key, value in entries.items()
    )
    return "credentials.yaml", "".join(lines)
