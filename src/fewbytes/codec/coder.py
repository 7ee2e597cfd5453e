"""One message: a state to bytes and back, and an encoder that sends later what rounding lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fewbytes.base.errors import FrameError, UserError
from fewbytes.base.rate import FEWEST, MOST, Rate
from fewbytes.codec.delta import base_for, received
from fewbytes.codec.first import First
from fewbytes.codec.states import (
    KINDS,
    AnyState,
    Exact,
    Packable,
    check_exact,
    exact_names,
    layout_of,
    packable,
    path_of,
    unpackable,
)
from fewbytes.wire import Lossy, Parsed, pack, pack_state, unpack, unpack_state
from fewbytes.wire.fields import PER_ITEM
from fewbytes.wire.header import MOST_ITEMS
from fewbytes.wire.values import flat_words

LIMIT = 1 << 30  # bytes of arrays


def check_bits(bits: float | None) -> Rate:
    """The rate of this number of bits per value (None: lossless). Raises UserError for a number out of range."""
    if bits is None:
        return Rate()
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not FEWEST <= bits <= MOST:
        raise UserError(f"bits must be from {FEWEST:g} to {MOST:g} per value, or None for lossless, not {bits!r}")
    return Rate(bits=float(bits))


def encode(state: AnyState, base: AnyState | None = None, bits: float | None = None, *, exact: Exact = None) -> bytes:
    """A state as bytes. `base`: a state that the receiver holds as well, such as the model it sent; only differences
    from it travel. `bits`: how many each value takes, about (None: lossless). `exact`: as in `Encoder`.

    Raises TypeError for a value that cannot travel, UserError for `bits` out of range.

    >>> import torch
    >>> from fewbytes.codec import decode, encode
    >>> sent = torch.nn.Linear(100, 10).state_dict()
    >>> trained = {name: value + 0.01 for name, value in sent.items()}
    >>> data = encode(trained, base=sent)
    >>> all(torch.equal(value, trained[name]) for name, value in decode(data, base=sent).items())
    True
    >>> len(encode(trained, base=sent, bits=1)) < len(data) < 4 * 1010
    True
    """
    return Encoder(bits, exact=exact).encode(state, base)


def decode(data: bytes, base: AnyState | None = None, limit: int = LIMIT) -> Any:
    """The state that was encoded, of the same kind: torch tensors, or NumPy arrays by name or in order.

    `base`: the state it was encoded against, equal bit for bit. `limit`: the most bytes that the decoded arrays may
    take. Raises DecodeError, and nothing else, for bytes that are not such a message.

    >>> import numpy as np
    >>> from fewbytes.codec import DecodeError, decode, encode
    >>> decode(encode([np.arange(3), np.zeros((2, 2))]))
    [array([0, 1, 2]), array([[0., 0.],
           [0., 0.]])]
    >>> try:
    ...     decode(b"something else")
    ... except DecodeError as error:
    ...     print(error.code)
    magic
    """
    return unpackable(decoded(data, None if base is None else packable(base), limit))


def decoded(data: bytes, base: Packable | None, limit: int = LIMIT, first: First | None = None) -> Packable:
    """The payload in a message, coded against `base` or, without one, `first`. Raises FrameError."""
    parsed = Parsed(data, max(MOST_ITEMS, limit // PER_ITEM))
    if parsed.kind not in KINDS:
        raise FrameError("type", f"the frame holds a {parsed.kind[:80]!r}, which is no state")
    layout, known = None, None
    if base is not None:
        layout = layout_of(base)
        known = base_for(parsed, base, layout)
    elif parsed.base_hash:
        if first is None:
            raise FrameError("base", "the message is coded against a state that is not held here")
        layout, known = first.layout, first.base(parsed.base_hash)
    return unpack(KINDS[parsed.kind], parsed, layout=layout, base=known, limit=limit)


@dataclass
class Residual:
    """What an encoder keeps: what rounding has lost, before (committed) and by the last message (pending)."""

    committed: dict[str, Tensor]
    pending: dict[str, Tensor] | None


class Encoder:
    """Encodes one sender's messages, and adds to each what rounding lost of those before (error feedback).

    `bits`: how many each value takes, about; None is lossless. `exact`: which tensors are not rounded: a function of
    the name, names, or positions (default: statistics of normalisation layers, by their names). `averaged`: set it if
    the receiver averages many such messages, as a server does. `residual`: what was lost before, by name.

    After a message that the receiver did not accept, `rollback` restores the residual.
    `commit` makes that final, and the next `encode` does as well.

    >>> import torch
    >>> from fewbytes.codec import Encoder, decode
    >>> encoder, weights = Encoder(bits=1), {"w": torch.randn(1000, generator=torch.manual_seed(0))}
    >>> received = sum(decode(encoder.encode(weights))["w"] for _ in range(20)) / 20
    >>> once = decode(Encoder(bits=1).encode(weights))["w"]
    >>> float((received - weights["w"]).norm() / (once - weights["w"]).norm()) < 0.2
    True
    """

    def __init__(
        self,
        bits: float | None = None,
        *,
        exact: Exact = None,
        averaged: bool = False,
        residual: Mapping[str, Tensor] | None = None,
    ) -> None:
        check_exact(exact)
        self._rate, self._exact, self._averaged = check_bits(bits), exact, averaged
        self._kept = Residual(dict(residual or {}), None)
        self.nmse = 0.0
        """The squared error of the last message over the squared norm of what was rounded; 0 for lossless."""

    @property
    def residual(self) -> dict[str, Tensor]:
        """What rounding has lost so far, by name."""
        return self._kept.committed if self._kept.pending is None else self._kept.pending

    def encode(self, state: AnyState, base: AnyState | None = None) -> bytes:
        """A state as bytes, as `fewbytes.codec.encode`."""
        self.commit()
        packed, known = packable(state), None if base is None else packable(base)
        layout = None if known is None else layout_of(known)
        against = None if known is None or layout is None else received(known, layout).base
        lossy = None
        if self._rate:
            lost = {path_of(packed): dict(self._kept.committed)} if self._kept.committed else {}
            lossy = Lossy(self._rate, exact_names(packed, self._exact), lost, self._averaged)
        data = bytes(pack(packed, layout=layout, base=against, lossy=lossy))
        if lossy is not None:
            self._kept.pending = next(iter(lossy.residual.values()), {})
            self.nmse = lossy.nmse
        return data

    def commit(self) -> None:
        """The last message was accepted."""
        self._kept.committed, self._kept.pending = self.residual, None

    def rollback(self) -> None:
        """The last message was not accepted: the residual is again what it was before this message."""
        self._kept.pending = None

    def state(self) -> bytes:
        """What to save to continue after a restart: see `load`."""
        return bytes(pack_state(self._kept))

    def load(self, data: bytes) -> None:
        """Resume from what `state` returned. Raises DecodeError if it is damaged."""
        self._kept = unpack_state(Residual, data)


def same(one: Packable, other: Packable) -> bool:
    """Whether two states are of one kind and layout, and equal bit for bit."""
    a, b = one.values.dense(), other.values.dense()
    alike = type(one) is type(other) and layout_of(one) == layout_of(other)
    return alike and all(np.array_equal(flat_words(value), flat_words(b[name])) for name, value in a.items())
