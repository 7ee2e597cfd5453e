"""Messages that wait for their clients' next requests, each in its own file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewbytes.base.errors import FrameError, MethodError, UserError
from fewbytes.base.files import private_folder, replacing
from fewbytes.core.network import Handler
from fewbytes.core.problem import Id
from fewbytes.engines.downlink import LazyMessage
from fewbytes.wire import Parsed, pack_state, unpack_state


@dataclass
class Waiting:
    """Messages to one handler that wait for their clients' next request, as stored in a checkpoint: the numbers of
    their files. All tensors are int64."""

    handler: str
    numbers: Tensor  # the file for each of `clients`
    clients: Tensor
    everybody: int | None  # the file for all other clients that are not in `had`
    had: Tensor
    part: str  # the subset of the network that they are for; empty: all of it
    members: Tensor  # the clients in that subset

    @property
    def files(self) -> set[int]:
        """The numbers of all files."""
        return {*self.numbers.tolist(), *([] if self.everybody is None else [self.everybody])}


class WaitingMessages:
    """Waiting messages by handler and subset of the network, in the order of the last messages, in which handlers run.

    A message is written to a file of `folder` at once and read when it is sent; none stays in memory. `handler_of`:
    finds a handler by name. `resumed`: messages of a checkpoint; raises UserError if a file is missing or damaged.
    """

    def __init__(self, folder: Path, handler_of: Callable[[str], Handler], resumed: Iterable[Waiting] = ()) -> None:
        self._folder, self._handler_of = folder, handler_of
        private_folder(folder)
        self._last = max((int(path.stem) for path in folder.glob("*.state") if path.stem.isdecimal()), default=0)
        self._members: dict[str, frozenset[Id]] = {}  # by subset of the network
        self._unsent: dict[tuple[str, str], _Unsent] = {}
        for each in resumed:
            self._unsent[each.handler, each.part] = _Unsent.unpacked(each)
            for number in each.files:
                self._read(handler_of(each.handler), number)

    def leave(self, handler: Handler, to: Mapping[Id, Any] | None, send: Any, part: str) -> None:
        """Add messages to some clients, or `send` to all of a subset; see `Network.tell`. Raises MethodError."""
        if handler.reply is not None:
            raise MethodError(f"handler {handler.name!r} replies, so its message cannot wait: use net.call")
        known = self._unsent.pop((handler.name, part), _Unsent())
        if to is None:
            unsent = _Unsent(everybody=None if send is None else self._write(handler, send))
        else:
            unsent, written = known, dict[int, int]()
            lasting = isinstance(to, dict)  # else messages may be temporary, and their ids reused
            for client, message in to.items():
                number = written.get(id(message)) if lasting else None
                if message is not None:
                    unsent.own[client] = written[id(message)] = number or self._write(handler, message)
        unsent.members = self._members.get(part)
        self._unsent[handler.name, part] = unsent

    def _write(self, handler: Handler, message: Any) -> int:
        handler.check(message)
        self._last += 1
        with replacing(self._path(self._last)) as file:
            for part in pack_state(message).parts:
                file.write(part)
        return self._last

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.state"

    def _read(self, handler: Handler, number: int) -> Parsed:
        path = self._path(number)
        try:
            parsed = Parsed(path.read_bytes(), None)
            if handler.message is None or parsed.kind != handler.message.__name__:
                raise FrameError("type", f"it holds a {parsed.kind[:80]!r}")
            return parsed
        except (FrameError, OSError) as error:
            raise UserError(
                f"the message {path}, which waits for a client, is missing or damaged: go back to an earlier round "
                f"(--from-round), or start a new run ({error})"
            ) from None

    def set_part(self, part: str, members: Sequence[Id]) -> None:
        """Set the members of a subset of the network; see `Network.among`."""
        self._members[part] = frozenset(members)
        for (_, where), unsent in self._unsent.items():
            if where == part:
                unsent.members = self._members[part]

    def of(self, client: Id) -> list[tuple[Handler, LazyMessage]]:
        """The messages that wait for a client."""
        there = [(name, unsent) for (name, _), unsent in self._unsent.items() if unsent.is_for(client)]
        return [(self._handler_of(name), self._lazy(name, unsent, client)) for name, unsent in there]

    def _lazy(self, name: str, unsent: _Unsent, client: Id) -> LazyMessage:
        handler, number = self._handler_of(name), unsent.number(client)
        return LazyMessage(("waiting", number), handler.message or type(None), partial(self._message, handler, number))

    def _message(self, handler: Handler, number: int) -> Any:
        return unpack_state(handler.message or type(None), self._read(handler, number))

    def handlers(self) -> list[str]:
        """The handlers for which messages may wait."""
        return list(dict.fromkeys(name for name, _ in self._unsent))

    def to(self, handler: str, clients: Iterable[Id]) -> dict[Id, LazyMessage]:
        """The messages that wait for a handler, by client."""
        of = [unsent for (name, _), unsent in self._unsent.items() if name == handler]
        return {i: self._lazy(handler, unsent, i) for i in clients for unsent in of if unsent.is_for(i)}

    def delivered(self, handler: str, client: Id) -> None:
        """Note that a client has received its messages to a handler."""
        for (name, _), unsent in self._unsent.items():
            if name == handler:
                unsent.own.pop(client, None)
                unsent.had.add(client)

    def clear(self) -> None:
        """Remove all."""
        self._unsent = {}

    def packed(self) -> list[Waiting]:
        """Its state for a checkpoint."""
        return [unsent.packed(name, part) for (name, part), unsent in self._unsent.items()]

    def places(self, before: Collection[int]) -> list[Path]:
        """The paths to sync so that waiting messages survive a power failure: files, without those of `before`, and
        their folder."""
        new = {number for each in self.packed() for number in each.files}.difference(before)
        return [*map(self._path, sorted(new)), self._folder] if new else []

    def keep_only(self, numbers: Collection[int]) -> None:
        """Remove all files but these, also half-written ones."""
        wanted = {self._path(number).name for number in numbers}
        for file in self._folder.iterdir():
            if file.name not in wanted and not file.is_dir():
                file.unlink(missing_ok=True)


@dataclass
class _Unsent:
    """Messages to one handler, by the numbers of their files: individual ones, and one for all other clients that have
    not received it."""

    own: dict[Id, int] = field(default_factory=dict)
    everybody: int | None = None
    had: set[Id] = field(default_factory=set)
    members: frozenset[Id] | None = None  # the clients that `everybody` is for; None: all

    def is_for(self, client: Id) -> bool:
        """Whether a message waits for the client."""
        there = self.members is None or client in self.members
        return client in self.own or (self.everybody is not None and there and client not in self.had)

    def number(self, client: Id) -> int:
        """The number of the client's message, if there is one."""
        return self.own.get(client, self.everybody or 0)

    def packed(self, handler: str, part: str) -> Waiting:
        """As stored in a checkpoint."""
        numbers = (list(self.own.values()), list(self.own), sorted(self.had), sorted(self.members or ()))
        files, own, had, members = (torch.tensor(each, dtype=torch.int64) for each in numbers)
        return Waiting(handler, files, own, self.everybody, had, part, members)

    @classmethod
    def unpacked(cls, waiting: Waiting) -> _Unsent:
        """Undo `packed`."""
        own = dict(zip(waiting.clients.tolist(), waiting.numbers.tolist(), strict=True))
        members = frozenset(waiting.members.tolist()) if waiting.part else None
        return cls(own, waiting.everybody, set(waiting.had.tolist()), members)
