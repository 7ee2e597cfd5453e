"""The messages of a secure-aggregation exchange, and what client and server both derive from them.

Both derive the graph of neighbours from the cohort, so a client need not trust the server's choice of neighbours.
A client derives its view, a digest of all it received; masks are derived from views.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Self

import torch
from msgspec import Meta
from torch import Tensor

from fewbytes.base.errors import MethodError
from fewbytes.base.ranges import MOST_SAMPLES, OF_TRAINING
from fewbytes.core.problem import Id
from fewbytes.methods.parts.masks import KEY, degree, ring
from fewbytes.wire import pack, payload

LEAST = 3
"""The minimum number of clients: with two, each could derive the other's values from the mean."""
MARK = 16  # bytes of a confirmation from one client to another
Key = Annotated[bytes, Meta(min_length=KEY, max_length=KEY)]


@payload
class ByClient:
    """The same number of bytes for each of some clients."""

    clients: Tensor  # int64, ascending
    data: bytes

    @classmethod
    def of(cls, pieces: Mapping[Id, bytes]) -> Self:
        clients = sorted(pieces)
        return cls(torch.tensor(clients, dtype=torch.int64), b"".join(pieces[i] for i in clients))

    def each(self, length: int) -> dict[Id, bytes]:
        """The bytes by client. Raises MethodError unless there are `length` bytes per client."""
        clients = self.clients.flatten().tolist()
        if len(set(clients)) != len(clients) or len(self.data) != length * len(clients):
            raise MethodError(f"{len(self.data)} bytes are not {length} for each of {len(clients)} clients")
        return {i: self.data[length * at : length * (at + 1)] for at, i in enumerate(clients)}


@payload
class Keys:
    """Client to server: its public keys for this exchange, and its number of training samples if they are weights."""

    sealing: Key  # to encrypt shares for this client
    masking: Key  # to agree on masks
    samples: Annotated[Annotated[int, Meta(ge=1, le=MOST_SAMPLES)] | None, OF_TRAINING]  # None: replies are unweighted
    heard: Annotated[bytes, Meta(max_length=KEY)] = b""  # digest of the last message without a reply (empty: none)


@payload
class Neighbours:
    """Server to client: the cohort, and both public keys (sealing, masking) of each of the client's neighbours."""

    cohort: Tensor  # int64, ascending
    keys: ByClient


@payload
class Dealt:
    """Client to server: encrypted shares of its secrets for each neighbour, and the digest of its own mask's seed."""

    shares: ByClient
    digest: Key


@payload
class Received:
    """Server to client: the continuing clients, the encrypted shares from its neighbours among them, and the total
    weight of all continuing clients."""

    going: Tensor  # int64, ascending
    shares: ByClient
    weight: int


@payload
class Arrived:
    """Server to client: the continuing clients whose masked values have arrived."""

    there: Tensor  # int64, ascending


@payload
class Confirmed:
    """Client to server: for each neighbour whose values have arrived, a mark that proves that this client received the
    same. Server to client: the marks from the client's neighbours."""

    marks: ByClient


@payload
class Revealed:
    """Client to server: its shares of the seeds of arrived clients, and of the private keys of dropped ones."""

    seeds: ByClient
    keys: ByClient


def numbers(clients: Iterable[Id]) -> Tensor:
    """Client ids as a tensor."""
    return torch.tensor(sorted(clients), dtype=torch.int64)


def clients_in(listed: Tensor) -> list[Id]:
    """The clients in a list. Raises MethodError unless they are unique and in ascending order."""
    clients: list[Id] = listed.flatten().tolist()
    if clients != sorted(set(clients)) or listed.dtype != torch.int64:
        raise MethodError("a list of clients names each once, in ascending order")
    return clients


def graph(cohort: Sequence[Id]) -> dict[Id, list[Id]]:
    """Each client's neighbours, determined by the cohort: clients form a ring ordered by digests."""
    head = digest("ring", cohort)
    return ring(sorted(cohort, key=lambda i: digest(head, i)), degree(len(cohort)))


def view(cohort: Sequence[Id], going: Sequence[Id], weight: int, handler: str, message: Any, heard: bytes) -> bytes:
    """A digest of everything that must be equal at all clients for their masks to cancel: the cohort, the continuing
    clients, the total weight, the handler, its message, and the digest `heard` of the previous message."""
    return digest("view", cohort, going, weight, handler, digest_of_message(message), heard)


def masks_of(view: bytes) -> str:
    """The purpose for which two clients agree on a mask."""
    return f"masks {view.hex()}"


def digest_of_message(message: Any) -> bytes:
    """A digest of 32 bytes of a message; empty for None."""
    return b"" if message is None else bytes(pack(message, coded=False))[-KEY:]


def digest(*parts: str | int | bytes | Sequence[Id]) -> bytes:
    """A digest of 32 bytes of the parts, unambiguous in their boundaries."""
    hasher = sha256()
    for part in parts:
        text = part if isinstance(part, bytes) else repr(part if isinstance(part, str | int) else list(part)).encode()
        hasher.update(len(text).to_bytes(8, "little") + text)
    return hasher.digest()
