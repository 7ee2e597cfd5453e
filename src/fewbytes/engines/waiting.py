"""Messages that wait for their clients' next requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fewbytes.base.errors import MethodError
from fewbytes.core.network import Handler
from fewbytes.core.problem import Id
from fewbytes.engines.handlers import unchanged
from fewbytes.wire import Base, pack_state, unpack_state


@dataclass
class Waiting:
    """Messages to one handler that wait for their clients' next request, as a checkpoint holds them."""

    handler: str
    frames: list[bytes]
    of: Tensor  # which frame each of `clients` is to get; this and what follows of clients int64
    clients: Tensor
    everybody: int | None  # which frame all others are to get who are not in `had`
    had: Tensor
    part: str  # of the network they are left in; empty: all of it
    members: Tensor  # who is in it


class WaitingMessages:
    """What waits, by handler and part of the network, in the order of the last messages, in which handlers run.

    `handler_of`: a handler by its name. `resumed`: what a checkpoint holds.
    """

    def __init__(self, handler_of: Callable[[str], Handler], resumed: Iterable[Waiting] = ()) -> None:
        self._handler_of = handler_of
        self._members: dict[str, frozenset[Id]] = {}  # of parts of the network
        self._unsent: dict[tuple[str, str], _Unsent] = {
            (each.handler, each.part): _Unsent.unpacked(each, handler_of(each.handler)) for each in resumed
        }

    def leave(self, handler: Handler, to: Mapping[Id, Any] | None, send: Any, part: str) -> None:
        """Messages to some clients, or `send` to everybody in a part; see `Network.tell`. Raises MethodError."""
        if handler.reply is not None:
            raise MethodError(f"handler {handler.name!r} replies, so it cannot be left with a next request: call it")
        known = self._unsent.pop((handler.name, part), _Unsent())
        unsent = _Unsent(everybody=send) if to is None else known
        unsent.members = self._members.get(part)
        unsent.own |= {} if to is None else {i: message for i, message in to.items() if message is not None}
        unsent.guard()
        self._unsent[handler.name, part] = unsent

    def set_part(self, part: str, members: Sequence[Id]) -> None:
        """Who is in a part of the network; see `Network.among`."""
        self._members[part] = frozenset(members)
        for (_, where), unsent in self._unsent.items():
            if where == part:
                unsent.members = self._members[part]

    def of(self, client: Id) -> list[tuple[Handler, Any]]:
        """What waits for a client. Raises MethodError for a message that was changed in place."""
        there = [(name, unsent) for (name, _), unsent in self._unsent.items() if unsent.is_for(client)]
        return [(self._handler_of(name), unsent.message(client)) for name, unsent in there]

    def handlers(self) -> list[str]:
        """The handlers for which something may wait."""
        return list(dict.fromkeys(name for name, _ in self._unsent))

    def to(self, handler: str, clients: Iterable[Id]) -> dict[Id, Any]:
        """What waits for a handler, by client."""
        of = [unsent for (name, _), unsent in self._unsent.items() if name == handler]
        return {i: unsent.message(i) for i in clients for unsent in of if unsent.is_for(i)}

    def delivered(self, handler: str, client: Id) -> None:
        """A client has had a message to that handler."""
        for (name, _), unsent in self._unsent.items():
            if name == handler:
                unsent.own.pop(client, None)
                unsent.had.add(client)

    def clear(self) -> None:
        """Forget all."""
        self._unsent = {}

    def packed(self) -> list[Waiting]:
        """All of it, for a checkpoint."""
        return [unsent.packed(name, part) for (name, part), unsent in self._unsent.items()]


@dataclass
class _Unsent:
    """Messages to one handler: to some clients their own, and one to everybody else who has not had it."""

    own: dict[Id, Any] = field(default_factory=dict)
    everybody: Any = None
    had: set[Id] = field(default_factory=set)
    members: frozenset[Id] | None = None  # whom the one to everybody can be for; None: anybody
    bases: dict[int, Base] = field(default_factory=dict)

    def guard(self) -> None:
        """Note the messages' tensors as they are, so that a change in place is an error."""
        self.bases = {key: self.bases.get(key) or Base.of(b"", message) for key, message in self._messages().items()}

    def _messages(self) -> dict[int, Any]:
        """Each message once."""
        return {id(message): message for message in (*self.own.values(), self.everybody) if message is not None}

    def is_for(self, client: Id) -> bool:
        """Whether there is one for the client."""
        there = self.members is None or client in self.members
        return client in self.own or (self.everybody is not None and there and client not in self.had)

    def message(self, client: Id) -> Any:
        """The client's message. Raises MethodError if it was changed in place."""
        message = self.own.get(client, self.everybody)
        unchanged(self.bases[id(message)])
        return message

    def packed(self, handler: str, part: str) -> Waiting:
        """As a checkpoint holds it."""
        messages = self._messages()
        frames = [bytes(pack_state(message)) for message in messages.values()]
        at = {key: i for i, key in enumerate(messages)}
        of = [at[id(message)] for message in self.own.values()]
        everybody = None if self.everybody is None else at[id(self.everybody)]
        numbers = (of, list(self.own), sorted(self.had), sorted(self.members or ()))
        of_whom, own, had, members = (torch.tensor(each, dtype=torch.int64) for each in numbers)
        return Waiting(handler, frames, of_whom, own, everybody, had, part, members)

    @classmethod
    def unpacked(cls, waiting: Waiting, handler: Handler) -> _Unsent:
        """Undo `packed`."""
        if handler.message is None:
            raise MethodError(f"messages wait for handler {handler.name!r}, which takes none")
        messages = [unpack_state(handler.message, frame) for frame in waiting.frames]
        own = {i: messages[at] for i, at in zip(waiting.clients.tolist(), waiting.of.tolist(), strict=True)}
        everybody = None if waiting.everybody is None else messages[waiting.everybody]
        members = frozenset(waiting.members.tolist()) if waiting.part else None
        unsent = cls(own, everybody, set(waiting.had.tolist()), members)
        unsent.guard()
        return unsent
