"""A mod for any Flower ClientApp: model updates in few bytes. The server's half is `fewbytes.flower.few_grid`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fewbytes.base.errors import FrameError, UserError
from fewbytes.codec import Decoder, Encoder, decode
from fewbytes.codec.coder import check_bits
from fewbytes.codec.states import Exact, FirstState, check_exact, first_state
from fewbytes.flower.kept_state import KeptState, load_state, save_state
from fewbytes.flower.records import KEY, LARGEST, UNKNOWN, Arrays, arrays_of, data_of, encoded, record_of, with_records

Call = Callable[[Message, Context], Message]
LOG = logging.getLogger("flwr.fewbytes")


def fewbytes_mod(
    bits: float | None = None, *others: object, exact: Exact = None, first: FirstState = None
) -> Callable[[Message, Context, Call], Message]:
    """A mod that decodes what the server sends and encodes what this client replies.

    `bits`: how many each value of a reply to a train message takes, about, as its difference from the model that the
    server sent; what rounding loses is sent in later rounds. None: lossless. `exact`: arrays that are not rounded, as
    in `fewbytes.codec.Encoder`. `first`: the weights that the app starts from, or a function that makes them, if the
    server's `compressed` is given the same: then they are not sent. Without `compressed` on the server, messages pass
    through unchanged.

    >>> from flwr.clientapp import ClientApp
    >>> from fewbytes.flower.mod import fewbytes_mod
    >>> app = ClientApp(mods=[fewbytes_mod(bits=0.5)])
    """
    if others:  # Flower passes a mod a message, a context and the next mod
        raise UserError("call fewbytes_mod where the app is made, mods=[fewbytes_mod()] or mods=[fewbytes_mod(bits=1)]")
    check_bits(bits)
    check_exact(exact)

    def mod(message: Message, context: Context, call_next: Call) -> Message:
        if not message.has_content() or KEY not in message.content.config_records:
            if message.has_content() and message.content.array_records:
                LOG.info("fewbytes: the server does not use compressed(): its messages and this node's are plain")
            return call_next(message, context)
        order, end = message.content.config_records[KEY], _End(context, bits, exact, first)
        try:
            received = end.received(message.content, order)
        except FrameError as error:
            LOG.info("fewbytes: this node needs the whole model (%s)", error)
            return Message(RecordDict({KEY: ConfigRecord({"needs": "whole"})}), reply_to=message)
        end.save()
        records = {name: record_of(arrays) for name, arrays in received.items()}
        message.content = with_records(message.content, records, None)
        reply = call_next(message, context)
        if reply.has_content():
            rounded = message.metadata.message_type.partition(".")[0] == "train"
            reply.content = end.reply(reply.content, received, rounded)
            end.save()
        return reply

    return mod


class _End:
    """This node's end of a run: what it holds of the server's models, and what rounding lost of its replies."""

    def __init__(self, context: Context, bits: float | None, exact: Exact, first: FirstState) -> None:
        self._context, self._bits, self._exact, self._first = context, bits, exact, first
        kept = load_state(context)
        self.number = kept.number
        self._decoders = {name: Decoder(LARGEST) for name in kept.decoders}
        self._encoders = {name: self._encoder() for name in kept.encoders}
        for name, decoder in self._decoders.items():
            decoder.load(kept.decoders[name])
        for name, encoder in self._encoders.items():
            encoder.load(kept.encoders[name])

    def _encoder(self) -> Encoder:
        return Encoder(self._bits, exact=self._exact, averaged=True)

    def received(self, content: RecordDict, order: ConfigRecord) -> dict[str, Arrays]:
        """The arrays of a message by record. Raises FrameError if they need a version that this node does not hold."""
        accepted = order.get("accepted", 0) in (UNKNOWN, self.number)
        for encoder in self._encoders.values():
            encoder.commit() if accepted else encoder.rollback()
        found: dict[str, Arrays] = {}
        for name, how in zip(_texts(order, "names"), _texts(order, "how"), strict=True):
            record = content.array_records[name]
            if how == "plain":
                found[name] = arrays_of(record) or {}
                stream, version = _texts(order, f"stream:{name}")
                self._decoders.setdefault(name, Decoder(LARGEST)).adopt(stream, int(version), found[name])
            elif how == "alone":
                found[name] = decode(data_of(record), limit=LARGEST)
            else:
                if name not in self._decoders:
                    self._decoders[name] = Decoder(LARGEST, first=first_state(self._first))
                found[name] = self._decoders[name].decode(data_of(record))
        return found

    def reply(self, content: RecordDict, received: Mapping[str, Arrays], rounded: bool) -> RecordDict:
        """A reply's content with its arrays encoded: against the received model that has them, if there is one."""
        records: dict[str, ArrayRecord] = {}
        bases: list[str] = []
        for name, record in content.array_records.items():
            arrays = arrays_of(record)
            if arrays is None:
                continue
            base = next((each for each, held in received.items() if _part_of(arrays, held)), None)
            if rounded and base is not None:
                encoder = self._encoders.setdefault(name, self._encoder())
                records[name] = encoded(encoder.encode(arrays, received[base]))
            else:
                records[name] = encoded(Encoder().encode(arrays, None if base is None else received[base]))
            bases.append(base or "")
        self.number += 1
        about = ConfigRecord({"names": list(records), "bases": bases, "number": self.number})
        return with_records(content, records, about)

    def save(self) -> None:
        """Keep all of it for the next message."""
        decoders = {name: decoder.state() for name, decoder in self._decoders.items()}
        encoders = {name: encoder.state() for name, encoder in self._encoders.items()}
        save_state(self._context, KeptState(self.number, decoders, encoders))


def _texts(order: ConfigRecord, key: str) -> list[str]:
    value = order.get(key, [])
    return [str(each) for each in value] if isinstance(value, list) else []


def _part_of(one: Arrays, other: Arrays) -> bool:
    """Whether all arrays are in another record, too. Types may differ: an average of counters has fractions."""
    return all(name in other and other[name].shape == array.shape for name, array in one.items())
