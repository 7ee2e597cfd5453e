"""What each end of an NVFlare job keeps from one task to the next: the versions of models, and what was accepted.

A client reports what it holds with each request for a task, so the server never has to guess: a client that is new, or
has lost its state, reports nothing and gets the whole model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fewbytes.base.errors import FrameError
from fewbytes.codec import Decoder, Encoder, Stream, decode
from fewbytes.codec.coder import LIMIT
from fewbytes.codec.first import First
from fewbytes.wire import pack_state, unpack_state

LARGEST = 1 << 36
"""Maximum bytes of a model that a client takes from its server."""
FIRST = ""
"""In what a client reports, beside tasks' names: the digest of the first weights that it holds."""
State = dict[str, Tensor]


def digest_of(first: State) -> str:
    """What tells first weights from others, as clients report it."""
    return First(first).digest.hex()


@dataclass(frozen=True)
class Order:
    """What the server states beside a task. `accepted`: the last task whose result it accepted from this client;
    `decodes`: whether it can decode a result; `stream`: the stream that the task's model is a version of."""

    accepted: str
    decodes: bool
    stream: str

    def as_header(self) -> dict[str, Any]:
        """As it travels."""
        return {"accepted": self.accepted, "decodes": self.decodes, "stream": self.stream}

    @staticmethod
    def of_header(header: Any) -> Order | None:
        """Undo `as_header`; None for anything else."""
        if not isinstance(header, dict):
            return None
        accepted, decodes, stream = (header.get(key) for key in ("accepted", "decodes", "stream"))
        if not isinstance(accepted, str) or not isinstance(stream, str):
            return None
        return Order(accepted, decodes is True, stream)


@dataclass
class Kept:
    """What a client's end saves, by task's name: streams, decoders and encoders; and the task of its last result."""

    streams: dict[str, str]
    decoders: dict[str, bytes]
    encoders: dict[str, bytes]
    sent: str


class ServerEnd:
    """The server's end of a job: a stream of models for each task's name; by client, what the task that it works on was
    sent with, and the last task whose result was accepted. `decodes`: whether results can be decoded here; `first`: the
    digest of the first weights that its streams begin from (empty: none)."""

    def __init__(self) -> None:
        self.decodes, self.first = False, ""
        self._lock = threading.Lock()  # clients' requests come in threads of their own
        self._streams: dict[str, Stream] = {}
        self._sent: dict[str, tuple[str, State]] = {}
        self._accepted: dict[str, str] = {}

    def order(self, client: str, task: str) -> Order:
        """What to state beside a task for a client."""
        stream = self._streams.get(task)
        return Order(self._accepted.get(client, ""), self.decodes, "" if stream is None else stream.name)

    def encode(
        self, client: str, task: tuple[str, str], state: State, holds: Mapping[str, Any], new: Callable[[], Stream]
    ) -> bytes:
        """A model for a client, which has reported what it `holds` (`ClientEnd.holds`). `task`: its name and id."""
        name, number = task
        with self._lock:
            stream = self._streams.setdefault(name, new())
            held = stream.advance(state)
            match holds.get(name):
                case [stream.name, int(version)]:
                    stream.received(client, version)
                case _:
                    stream.forget(client, holds_first=self.first != "" and holds.get(FIRST) == self.first)
            self._sent[client] = number, held
            return stream.message(client)

    def decode(self, client: str, task: str, data: bytes, against: bool) -> State:
        """The tensors in a client's result for the task of this id. `against`: whether they are coded against the model
        that the client was sent. Raises FrameError."""
        with self._lock:
            number, held = self._sent.get(client, ("", {}))
        if against and number != task:
            raise FrameError("base", "the result is for a task that this client was not sent last")
        size = sum(value.nbytes for value in held.values())
        state = decode(data, held if against else None, max(LIMIT, 2 * size))
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise FrameError("type", "the result holds no tensors by name")
        with self._lock:
            self._accepted[client] = task
        return state


class ClientEnd:
    """A client's end of a job: the models that it holds, what rounding lost of its results, and the last task. `swaps`:
    whether its process may end after a task, so that it is saved after each; `first`: the weights that it holds before
    the first model comes."""

    def __init__(self) -> None:
        self.swaps = False
        self.first: State | None = None
        self.order: Order | None = None
        self._decoders: dict[str, Decoder] = {}
        self._encoders: dict[str, Encoder] = {}
        self._saved: dict[str, bytes] = {}  # of encoders that were not used since `load`
        self._streams: dict[str, str] = {}
        self._model: State = {}
        self._sent = ""
        self._accepted = True

    def begin(self, order: Order | None) -> None:
        """A task has come, with what the server states beside it: the last result was accepted, or has not happened."""
        self.order, self._model = order, {}
        self._accepted = order is not None and order.accepted == self._sent
        for encoder in self._encoders.values():
            encoder.commit() if self._accepted else encoder.rollback()

    def holds(self) -> dict[str, Any]:
        """What to report to the server: by task's name, a stream and the version of it that is held here; and the
        digest of the first weights, if there are any."""
        held: dict[str, Any] = {t: [self._streams[t], decoder.version] for t, decoder in self._decoders.items()}
        return held if self.first is None else held | {FIRST: digest_of(self.first)}

    def decode(self, task: str, data: bytes) -> State:
        """The model of the task that has come. Raises FrameError for a message that does not lead to one; then nothing
        is held any more, so that the next model comes whole."""
        decoder = self._decoders.setdefault(task, Decoder(LARGEST, first=self.first))
        try:
            state = decoder.decode(data)
            if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
                raise FrameError("type", "the message holds no tensors by name")
        except FrameError:
            del self._decoders[task]
            raise
        self._streams[task] = "" if self.order is None else self.order.stream
        self._model = state
        return state

    def encode(
        self, task: tuple[str, str], state: State, whole: bool, new: Callable[[], Encoder]
    ) -> tuple[bytes, bool]:
        """A result as bytes, and whether it is coded against the model that came. `task`: its name and id; `whole`:
        the result is weights, and not a difference already."""
        (name, self._sent), model = task, self._model
        encoder = self._encoders.setdefault(name, new())
        if name in self._saved:
            encoder.load(self._saved.pop(name))
            encoder.commit() if self._accepted else encoder.rollback()
        against = whole and all(each in model and model[each].shape == value.shape for each, value in state.items())
        return encoder.encode(state, model if against else None), against

    def state(self) -> bytes:
        """What to save, to resume in another process: see `load`."""
        decoders = {task: decoder.state() for task, decoder in self._decoders.items()}
        encoders = self._saved | {task: encoder.state() for task, encoder in self._encoders.items()}
        return bytes(pack_state(Kept(dict(self._streams), decoders, encoders, self._sent)))

    def load(self, data: bytes) -> None:
        """Resume from what `state` returned. Raises FrameError if it is damaged."""
        kept, decoders = unpack_state(Kept, data), dict[str, Decoder]()
        for task, saved in kept.decoders.items():
            decoders[task] = Decoder(LARGEST, first=self.first)
            decoders[task].load(saved)
        self._streams, self._decoders, self._saved, self._sent = kept.streams, decoders, kept.encoders, kept.sent
