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

SECRET, TRAINED = "secret", ".trained"  # files that survive restarts of a run


class ClientStore:
    """The files `<client>-<version>.state` of a folder, cached only by the system's page cache.

    A new version never overwrites the previous one, so killing a worker or run leaves intact states. `keep_only`
    removes versions that no kept checkpoint needs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        private_folder(folder)

    def secret(self) -> bytes:
        """32 secret bytes, readable only in this folder, drawn at first use. Raises UserError for another length, which
        others could know."""
        path = self.folder / SECRET
        with locked(self.folder / f"{SECRET}.lock"):
            if not path.exists():
                with replacing(path, sync=True) as file:
                    os.chmod(file.name, 0o600)
                    file.write(secrets.token_bytes(32))
            if len(known := path.read_bytes()) == 32:
                return known
            raise UserError(f"{path} is damaged: remove it, so that a new secret is drawn and no noise is repeated")

    def trained(self, client: Id, begin: bytes, spent: Steps | None = None) -> int:
        """Note durably that a client trains from the state with this 32-byte digest; returns from how many different
        states it has trained. A run's folder does not use `spent`."""
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
        """A client's state, not yet unpacked. Raises FrameError if the file is damaged, OSError if it is missing."""
        return Parsed(self.path(client, version).read_bytes(), None)

    def check(self, client: Id, version: int) -> None:
        """Raises UserError if a client's state is missing or damaged."""
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
        """The paths to sync so that these states (client, version; 0: none) survive a power failure: files and their
        folder."""
        files = [self.path(client, version) for client, version in states if version]
        return [*files, self.folder] if files else []

    def keep_only(self, *kept: Mapping[Id, int], busy: Iterable[Id] = ()) -> None:
        """Remove all files but these versions, also files half-written by a stopped worker. Keeps those of `busy`
        clients, which a worker may be writing."""
        wanted = {self.path(client, version).name for each in kept for client, version in each.items() if version}
        wanted.add(SECRET)
        theirs = tuple(f"{client}-" for client in busy)
        for file in self.folder.iterdir():
            if not (file.name in wanted or file.suffix == TRAINED or file.name.lstrip(".").startswith(theirs)):
                file.unlink(missing_ok=True)

    def keep_only_of(self, client: Id, versions: Iterable[int]) -> None:
        """Remove all versions of one client's state but these."""
        wanted = {self.path(client, version).name for version in versions}
        for file in self.folder.glob(f"{client}-*.state"):
            if file.name not in wanted:
                file.unlink(missing_ok=True)
