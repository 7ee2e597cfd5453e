"""Client states on disk: one file per client and version, so that a handler run twice starts from the same state."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from pathlib import Path
from typing import Any

from fewbytes.base.errors import FrameError, MethodError, UserError
from fewbytes.base.files import replacing
from fewbytes.core.method import Method
from fewbytes.core.network import required
from fewbytes.core.problem import Id
from fewbytes.wire import Parsed, pack, unpack
from fewbytes.wire.fields import check_fields


class ClientStore:
    """The files `<client>-<version>.state` of a folder. Memory holds none of them; the system's page cache, which
    is bounded by free memory, is the only cache. A new version never overwrites the one before: that one goes
    when a checkpoint no longer needs it (`keep_only`), so a killed worker or run leaves whole states behind.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, client: Id, version: int) -> Path:
        """The file of a client's state; versions count from 1."""
        return self.folder / f"{client}-{version}.state"

    def load(self, kind: type[Any], client: Id, version: int) -> Any:
        """A client's state. Raises FrameError if the file is damaged, OSError if it is gone."""
        return unpack(kind, self.path(client, version).read_bytes(), limit=1 << 40)

    def check(self, client: Id, version: int) -> None:
        """Raises UserError if a client's state is gone or damaged."""
        path = self.path(client, version)
        try:
            Parsed(path.read_bytes())
        except (FrameError, OSError) as error:
            raise UserError(f"client {client}'s state {path} is gone or damaged: start a new run ({error})") from None

    def save(self, state: Any, client: Id, version: int) -> None:
        """Write a client's state as a new version."""
        with replacing(self.path(client, version)) as file:
            for part in pack(state, coded=False).parts:
                file.write(part)

    def keep_only(self, versions: dict[Id, int]) -> None:
        """Remove every file but these versions (and what a stopped worker left half-written)."""
        wanted = {self.path(client, version).name for client, version in versions.items() if version}
        for file in self.folder.iterdir():
            if file.name not in wanted:
                file.unlink(missing_ok=True)

    def keep_only_of(self, client: Id, versions: set[int]) -> None:
        """Remove every version of one client's state but these."""
        wanted = {self.path(client, version).name for version in versions}
        for file in self.folder.glob(f"{client}-*.state"):
            if file.name not in wanted:
                file.unlink(missing_ok=True)


def state_class(method: Method, half: str) -> type[Any] | None:
    """The class of the state that `method.server` or `method.client` makes, by its return type; None for no state.

    Raises MethodError if the type does not say, or the state cannot be packed.
    """
    function = getattr(type(method), half)
    if half not in vars(type(method)) and function is getattr(Method, half):
        return None
    kind = required(typing.get_type_hints(function).get("return", inspect.Signature.empty))
    if kind is type(None):
        return None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise MethodError(f"{type(method).__name__}.{half} must say by its return type which dataclass the state is")
    check_fields(kind)
    return kind
