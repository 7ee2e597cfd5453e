"""A node's short job: carries out the orders that lie in its inbox, and ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fewbytes.base.address import host_and_port
from fewbytes.base.errors import FrameError, UserError, one_line
from fewbytes.engines.handlers import Done
from fewbytes.flower.apps import failure, node_folder
from fewbytes.flower.mailbox_link import Returned, Sent
from fewbytes.flower.messages import decoded, read_content, seal_of, split_frames, write_content
from fewbytes.flower.node import Order, encoded
from fewbytes.flower.node_file import NodeFile
from fewbytes.flower.private.messages import in_no_task
from fewbytes.mailbox.box import Box
from fewbytes.mailbox.keys import node_key, proven_key
from fewbytes.mailbox.sealed import Header, NotAccepted, open_sealed, read_header
from fewbytes.mailbox.site import Site, once

DONE = ".mailbox"
"""The folder of what a node has carried out by mailbox, beside its run folders; no run can have this name."""


def carry_out_once(file: Path, app: ClientApp, inbox: str, outbox: str, say: Callable[[str], None]) -> int:
    """Carry out the orders in a node's inbox with a client app, as a connected node does, and write answers into its
    outbox; returns how many. `file`: the node's.

    Raises UserError for an unusable file, key or place and while another job of the node works, BoxError if a place
    cannot be reached.
    """
    about = NodeFile.read(file).placed(file.parent)
    site = _site(file, about)
    orders = Box(inbox)
    if orders.is_local and not orders.is_there():
        raise UserError(f"there is no inbox {inbox}: name the folder with the server's orders")
    site.folder.parent.mkdir(parents=True, exist_ok=True)
    in_no_task()

    def carry_out(header: Header, content: bytes) -> bytes:
        sent, config = _sent(header, content), {"key": about.key, **about.config}
        return msgspec.msgpack.encode(_carried_out(app, header, sent, config, say))

    return once(site, orders, Box(outbox), carry_out, say)


def read_order(file: Path, data: bytes) -> tuple[Order, list[memoryview]]:
    """An order in a sealed file, and the frames of its messages, as the node of `file` can read them. Raises UserError
    for an unusable file, NotAccepted for one that the node would refuse."""
    site, header = _site(file, NodeFile.read(file).placed(file.parent)), read_header(data)
    if header.kind != "order":
        raise NotAccepted("it is an answer, which only the server can read; what it holds is in the node's .reply file")
    sent = _sent(header, open_sealed(data, site.prove(header.certificates), site.key))
    order = decoded(sent.order, Order)
    lengths = [part.length for part in order.job.parts]
    return order, split_frames(memoryview(sent.frame), lengths) if sent.kind.startswith("train") else []


def _site(file: Path, about: NodeFile) -> Site:
    """The site of a node. Raises UserError."""
    name = about.config.get("member")
    if name is None:
        raise UserError(f"{file} names no member: make the node with `fewbytes node init`")
    host, ca = host_and_port(about.superlink, f"{file}: superlink")[0], Path(about.ca)
    key = node_key(Path(about.key))
    return Site(str(name), key, lambda pem: proven_key(pem, ca, host), node_folder(about.config) / DONE)


def _sent(header: Header, content: bytes) -> Sent:
    """The content of an order. Raises UserError for that of another version."""
    try:
        return decoded(content, Sent)
    except FrameError:
        raise UserError(f"the {header.described()} is of another version of fewbytes: install the same") from None


def _carried_out(
    app: ClientApp, header: Header, order: Sent, config: Mapping[str, Any], say: Callable[[str], None]
) -> Returned:
    """The app's answer to an order; errors are handled as by a resident node."""
    message = Message(write_content(order.order, order.frame), 0, order.kind, group_id=order.group)
    context = Context(
        run_id=0, node_id=0, node_config=dict(config), state=RecordDict(), run_config=dict(order.settings)
    )
    what, began = f"{header.run}, round {order.group}: {order.kind}", time.monotonic()
    try:
        reply = app(message, context)
    except Exception as error:  # a connected node reports as much to the server
        say(f"ERROR: {one_line(error)}")
        return Returned(encoded(Done(0, error=one_line(error, 300))))
    if why := failure(reply):
        say(f"{what} failed: {why}")
    else:
        say(f"{what} took {time.monotonic() - began:.2f} s")
    answer, frame = read_content(reply.content)
    return Returned(answer, bytes(frame), seal_of(reply.content))
