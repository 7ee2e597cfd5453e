"""A site's side of a mailbox: carries out the orders in its inbox, and writes the answers into its outbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

from fewbytes.base.errors import UserError, cleaned
from fewbytes.base.files import lock, private_folder, replacing
from fewbytes.mailbox.box import Box
from fewbytes.mailbox.sealed import Header, NotAccepted, Unfinished, open_sealed, read_header, seal
from fewbytes.mailbox.server import ANSWER, ORDER, SERVER, file_name

CarryOut = Callable[[Header, bytes], bytes]
"""Carries out the content of an order; returns the content of its answer."""


class Done(msgspec.Struct, array_like=True):
    """The last order of a series that a site has carried out."""

    number: int
    nonce: str


class Site(NamedTuple):
    """A site: its name, its private key, how it proves a server's key from certificates, and a folder for what it has
    carried out."""

    name: str
    key: EllipticCurvePrivateKey
    prove: Callable[[str], EllipticCurvePublicKey]
    folder: Path


class _Found(NamedTuple):
    """An order in the inbox."""

    header: Header
    name: str
    data: bytes


def once(site: Site, inbox: Box, outbox: Box, carry_out: CarryOut, say: Callable[[str], None]) -> int:
    """Carry out the orders in a site's inbox, in ascending order; returns how many were carried out.

    An order whose answer is still in the outbox is not carried out again; without the answer, it is. Older ones, those
    of others and changed ones are refused, with a line for `say`. The inbox is only read.

    Raises UserError while another process works for the same site, BoxError if a box cannot be used.
    """
    count = 0
    with _alone(site.folder):
        for order in _orders(site, inbox, say):
            known = _read(site.folder)
            last = known.get(order.header.series, Done(0, ""))
            try:
                content = _opened(site, order, last)
            except NotAccepted as error:
                say(f"{cleaned(order.name)} is refused: {cleaned(str(error))}")
                continue
            answer = file_name(order.header, ANSWER)
            if order.header.number == last.number and _is_whole(outbox, answer):
                continue
            reply = msgspec.structs.replace(
                order.header, kind="answer", sender=site.name, receiver=SERVER, certificates=""
            )
            data = seal(reply, carry_out(order.header, content), site.key, site.prove(order.header.certificates))
            outbox.make()
            outbox.write(answer, data)
            known[order.header.series] = Done(order.header.number, order.header.nonce)
            with replacing(site.folder / "done.json", sync=True) as file:
                file.write(msgspec.json.encode(known))
            _clear(outbox, order.header)
            say(f"the answer is {outbox.place}/{answer}: {len(data):,} bytes")
            count += 1
    return count


def _orders(site: Site, inbox: Box, say: Callable[[str], None]) -> Iterator[_Found]:
    """The orders to a site, in ascending order within each series."""
    found = []
    for name in inbox.names(ORDER):
        try:
            header = read_header(data := inbox.read(name))
            if header.kind != "order" or header.receiver != site.name:
                raise NotAccepted(f"it is the {header.kind} to {header.receiver}, and this is {site.name}")
            found.append(_Found(header, name, data))
        except Unfinished:
            say(f"{cleaned(name)} is not complete yet: it is left for the next job")
        except NotAccepted as error:
            say(f"{cleaned(name)} is refused: {cleaned(str(error))}")
    yield from sorted(found, key=lambda order: (order.header.series, order.header.number, order.name))


def _opened(site: Site, order: _Found, last: Done) -> bytes:
    """The content of an order. Raises NotAccepted."""
    header = order.header
    content = open_sealed(order.data, site.prove(header.certificates), site.key)
    if header.number < last.number:
        raise NotAccepted(
            f"number {header.number}, of {header.when}, is old: this site has carried out number {last.number}"
        )
    if header.number == last.number and header.nonce != last.nonce:
        raise NotAccepted(f"number {header.number} was another order: this site has carried that out")
    return content


def _is_whole(outbox: Box, answer: str) -> bool:
    """Whether an answer is in the outbox, and not cut short, as by a job or a copy that was interrupted."""
    if answer not in outbox.names(ANSWER):
        return False
    try:
        read_header(outbox.read(answer))
    except NotAccepted:
        return False
    return True


def _clear(outbox: Box, header: Header) -> None:
    """Remove answers to earlier orders of the series, which the server no longer awaits."""
    start, end = file_name(header, "").rpartition(".")[0], file_name(header, ANSWER)
    for name in outbox.names(ANSWER):
        if name.startswith(f"{start}.") and name < end:
            outbox.remove(name)


def _read(folder: Path) -> dict[str, Done]:
    """The last order carried out, by series."""
    path = folder / "done.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Done]) if path.exists() else {}
    except msgspec.MsgspecError:
        raise UserError(f"{path} is damaged: restore a copy of it, or remove it to accept old orders again") from None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Raises UserError if another process works for the site."""
    private_folder(folder)
    handle = lock(folder / "lock")
    if handle is None:
        raise UserError("another job of this node is at work: this one has nothing to do")
    with handle:
        yield
