"""Messages as differences from the last one: what senders and receivers do, whatever a message is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.wire import Base, Frame, Layout, Lossy, base_of, pack, unpack

LIMIT = 1 << 40  # maximum bytes of a serialised message
SHARE = 0.5  # of a serialised message: maximum of the kept differences together, unless there is only one


class Received(NamedTuple):
    """A message as a receiver has it, the base of its reply, and the serialised message to keep (empty: nothing)."""

    message: Any
    base: Base
    kept: bytes


@dataclass(frozen=True)
class DeltaStream:
    """The last of a sequence of messages with the same layout.

    `held`: the message as its receivers have it, serialised. `lost`: the accumulated rounding error, by field and name.
    `steps`: frames of differences, each from the message before; the last leads to this message.
    """

    name: str
    number: int
    held: bytes
    lost: dict[str, dict[str, Tensor]]
    steps: list[bytes]

    def since(self, number: int) -> list[bytes] | None:
        """The steps that lead from an earlier message to this one; None if they are not kept."""
        behind = self.number - number
        return self.steps[len(self.steps) - behind :] if 0 <= behind <= len(self.steps) else None


def serialised(message: Any, layout: Layout) -> bytes:
    """A message as sender and receiver keep it: an uncoded frame, whose digest identifies it at both ends."""
    return bytes(pack(message, layout=layout, coded=False))


def base_from(kind: type[Any], frame: bytes, layout: Layout) -> Base:
    """The base of the next message, from the frame that `serialised` returned."""
    return base_of(frame[-32:], unpack(kind, frame, layout=layout, limit=LIMIT))


def received(message: Any, layout: Layout) -> Received:
    """A message that came whole."""
    kept = serialised(message, layout)
    return Received(message, base_of(kept[-32:], message), kept)


def followed(kind: type[Any], frame: bytes | memoryview, layout: Layout, before: bytes | None) -> Received:
    """A message that came as its difference from the message `before`. Raises FrameError if that is another one."""
    if before is None:
        raise FrameError("base", "the message is coded against one that this client does not have: send in full")
    return received(unpack(kind, frame, layout=layout, base=base_from(kind, before, layout)), layout)


def advanced(
    stream: DeltaStream, message: Any, layout: Layout, coded: bool, lossy: Lossy | None, shared: bool
) -> tuple[DeltaStream, Received, Frame]:
    """A stream's next message: the stream after it, the message as receivers will have it, and its frame.

    `lossy`: how differences are rounded. `shared`: whether the stream has several receivers, of which some may miss
    this message: then its step is kept, and what rounding lost, to be added to the next message.
    """
    before = base_from(type(message), stream.held, layout)
    frame = pack(message, layout=layout, base=before, coded=coded, lossy=lossy)
    data = bytes(frame)
    new = received(unpack(type(message), data, layout=layout, base=before, limit=LIMIT), layout)
    steps = [*stream.steps, data] if shared else []
    while len(steps) > 1 and sum(map(len, steps)) > SHARE * len(new.kept):
        steps.pop(0)
    lost = lossy.residual if shared and lossy is not None else {}
    return DeltaStream(stream.name, stream.number + 1, new.kept, lost, steps), new, frame
