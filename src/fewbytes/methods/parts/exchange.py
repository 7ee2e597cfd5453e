"""What travels in an exchange of secure aggregation, and what both ends make of it: who takes part, and in what view.

Client and server compute the same from the same numbers, so that a client need not believe whom it is given for a
neighbour: from the cohort follows the graph, and from all that clients received a view, of which masks are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Self

import torch
from msgspec import Meta
from torch import Tensor

from fewbytes.base.errors import MethodError
from fewbytes.base.ranges import Samples
from fewbytes.core.problem import Id
from fewbytes.methods.parts.masks import KEY, degree, ring
from fewbytes.wire import pack, payload

LEAST = 3
"""Of fewer clients each would learn from the mean what the other sent."""
MARK = 16  # bytes by which a client confirms to another what it received
Key = Annotated[bytes, Meta(min_length=KEY, max_length=KEY)]


@payload
class ByClient:
    """Equally many bytes for each of some clients."""

    clients: Tensor  # int64, ascending
    data: bytes

    @classmethod
    def of(cls, pieces: Mapping[Id, bytes]) -> Self:
        clients = sorted(pieces)
        return cls(torch.tensor(clients, dtype=torch.int64), b"".join(pieces[i] for i in clients))

    def each(self, length: int) -> dict[Id, bytes]:
        """By client. Raises MethodError unless so many bytes are there for each."""
        clients = self.clients.flatten().tolist()
        if len(set(clients)) != len(clients) or len(self.data) != length * len(clients):
            raise MethodError(f"{len(self.data)} bytes are not {length} for each of {len(clients)} clients")
        return {i: self.data[length * at : length * (at + 1)] for at, i in enumerate(clients)}


@payload
class Keys:
    """Client to server: its public keys of this exchange, and on how many samples it trains."""

    sealing: Key  # with which shares for it are sealed
    masking: Key  # with which masks are agreed on
    samples: Samples
    heard: Annotated[bytes, Meta(max_length=KEY)] = b""  # digest of what it last received beside (empty: nothing)


@payload
class Neighbours:
    """Server to client: who takes part, and both public keys of each of its neighbours, for sealing and for masking."""

    cohort: Tensor  # int64, ascending
    keys: ByClient


@payload
class Dealt:
    """Client to server: sealed shares of its secrets for each neighbour, and what its own mask's seed hashes to."""

    shares: ByClient
    digest: Key


@payload
class Received:
    """Server to client: who goes on, the shares that its neighbours among them have sealed for it, and what all who go
    on weigh together."""

    going: Tensor  # int64, ascending
    shares: ByClient
    weight: int


@payload
class Arrived:
    """Server to client: of those who went on, whose numbers have come."""

    there: Tensor  # int64, ascending


@payload
class Confirmed:
    """Client to server: for each neighbour whose numbers have come a mark by which it knows that this client received
    the same. Server to client: the marks that its neighbours made for it."""

    marks: ByClient


@payload
class Revealed:
    """Client to server: its shares of the seeds of those there, and of the private keys of those gone."""

    seeds: ByClient
    keys: ByClient


def numbers(clients: Iterable[Id]) -> Tensor:
    """Clients as they travel."""
    return torch.tensor(sorted(clients), dtype=torch.int64)


def clients_in(listed: Tensor) -> list[Id]:
    """The clients in a list. Raises MethodError unless each is there once, in ascending order."""
    clients: list[Id] = listed.flatten().tolist()
    if clients != sorted(set(clients)) or listed.dtype != torch.int64:
        raise MethodError("a list of clients names each once, in ascending order")
    return clients


def graph(cohort: Sequence[Id]) -> dict[Id, list[Id]]:
    """Each client's neighbours, which follow from who takes part: the ring's order is that of digests."""
    head = digest("ring", cohort)
    return ring(sorted(cohort, key=lambda i: digest(head, i)), degree(len(cohort)))


def view(cohort: Sequence[Id], going: Sequence[Id], weight: int, handler: str, message: Any, heard: bytes) -> bytes:
    """A digest of all that clients must have received alike for their masks to cancel: who takes part and who goes on,
    what they weigh, which handler they run, on what message, after what they heard before."""
    return digest("view", cohort, going, weight, handler, digest_of_message(message), heard)


def masks_of(view: bytes) -> str:
    """The purpose for which two clients agree on a mask."""
    return f"masks {view.hex()}"


def digest_of_message(message: Any) -> bytes:
    """32 bytes that are equal for equal messages alone; empty for none."""
    return b"" if message is None else bytes(pack(message, coded=False))[-KEY:]


def digest(*parts: str | int | bytes | Sequence[Id]) -> bytes:
    """32 bytes that are equal for equal parts alone."""
    hasher = sha256()
    for part in parts:
        text = part if isinstance(part, bytes) else repr(part if isinstance(part, str | int) else list(part)).encode()
        hasher.update(len(text).to_bytes(8, "little") + text)
    return hasher.digest()
