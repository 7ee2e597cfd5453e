"""Client states on disk: one file per client and version, so that a handler run twice starts from the same state."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fewbytes.base.errors import FrameError, UserError
from fewbytes.base.files import locked, private_folder, replacing
from fewbytes.core.privacy import Steps
from fewbytes.core.problem import Id
from fewbytes.wire import Parsed, pack_state

SECRET, TRAINED = "secret", ".trained"  # files that are kept however often a run begins again


class ClientStore:
    """The files `<client>-<version>.state` of a folder. Memory holds none of them; the system's page cache, which
    is bounded by free memory, is the only cache. A new version never overwrites the one before: that one goes
    when no kept checkpoint needs it (`keep_only`), so a killed worker or run leaves whole states behind.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        private_folder(folder)

    def secret(self) -> bytes:
        """32 bytes that only who reads the folder knows, drawn when they are first asked for. Raises UserError where
        they are fewer or more, as others could know those."""
        path = self.folder / SECRET
        with locked(self.folder / f"{SECRET}.lock"):
            if not path.exists():
                with replacing(path, sync=True) as file:
                    os.chmod(file.name, 0o600)
                    file.write(secrets.token_bytes(32))
            if len(known := path.read_bytes()) == 32:
                return known
            raise UserError(f"{path} is damaged: remove it, so that another is drawn, and noise is never the same")

    def trained(self, client: Id, begin: bytes, spent: Steps | None = None) -> int:
        """Note that a client trains from what has these 32 bytes for a digest, so that no loss of power undoes it; from
        how many different beginnings it has. What that spends is no concern of a run's folder."""
        path = self.folder / f"{client}{TRAINED}"
        known = path.read_bytes() if path.exists() else b""
        digests = {known[i : i + 32] for i in range(0, len(known), 32)}
        if begin not in digests:
            with replacing(path, sync=True) as file:
                file.write(known + begin)
        return len(digests | {begin})

    def path(self, client: Id, version: int) -> Path:
        """The file of a client's state; versions count from 1."""
        return self.folder / f"{client}-{version}.state"

    def parsed(self, client: Id, version: int) -> Parsed:
        """A client's state, to be unpacked. Raises FrameError if the file is damaged, OSError if it is gone."""
        return Parsed(self.path(client, version).read_bytes(), None)

    def check(self, client: Id, version: int) -> None:
        """Raises UserError if a client's state is gone or damaged."""
        path = self.path(client, version)
        try:
            Parsed(path.read_bytes(), None)
        except (FrameError, OSError) as error:
            raise UserError(
                f"client {client}'s state {path} is gone or damaged: go back to an earlier round (--from-round), or "
                f"start a new run ({error})"
            ) from None

    def save(self, state: Any, client: Id, version: int) -> None:
        """Write a client's state as a new version."""
        with replacing(self.path(client, version)) as file:
            for part in pack_state(state).parts:
                file.write(part)

    def places(self, states: Iterable[tuple[Id, int]]) -> list[Path]:
        """What must be on the disk for these clients' states, of these versions (0: none), to survive a loss of power:
        their files, and the folder that has their names."""
        files = [self.path(client, version) for client, version in states if version]
        return [*files, self.folder] if files else []

    def keep_only(self, *kept: Mapping[Id, int], busy: Iterable[Id] = ()) -> None:
        """Remove every file but these versions (and what a stopped worker left half-written). Those of clients who are
        `busy` stay, as a worker may be writing one."""
        wanted = {self.path(client, version).name for each in kept for client, version in each.items() if version}
        wanted.add(SECRET)
        theirs = tuple(f"{client}-" for client in busy)
        for file in self.folder.iterdir():
            if not (file.name in wanted or file.suffix == TRAINED or file.name.lstrip(".").startswith(theirs)):
                file.unlink(missing_ok=True)

    def keep_only_of(self, client: Id, versions: Iterable[int]) -> None:
        """Remove every version of one client's state but these."""
        wanted = {self.path(client, version).name for version in versions}
        for file in self.folder.glob(f"{client}-*.state"):
            if file.name not in wanted:
                file.unlink(missing_ok=True)
