"""Dense: all values of a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from fewbytes.base.state import State
from fewbytes.wire import words
from fewbytes.wire.schema import leaves_of
from fewbytes.wire.value import Counted, Reader, Writer


@dataclass(frozen=True, eq=False)
class Dense:
    """Complete named tensors: `state[name]` of any shape and type. Papers count the values' own bytes.

    >>> import fewbytes as fb
    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> fb.Dense(fb.state_of(model)).counted().value_bytes
    32
    """

    state: State
    roundable: ClassVar[bool] = True  # a run may round it: see `Writer.state`

    def dense(self) -> State:
        """The tensors by name."""
        return self.state

    def write(self, writer: Writer) -> Any:
        """All tensors of a type together; the header is that of `Writer.state`."""
        return writer.state(self.state, lossy=True)

    @classmethod
    def read(cls, header: Any, reader: Reader) -> Self:
        """Tensors of the types and shapes in the header. Raises FrameError as `Reader.state`."""
        return cls(reader.state(header))

    def states(self) -> State:
        """All tensors."""
        return self.state

    def numbers(self) -> State:
        """All tensors."""
        return self.state

    def counted(self) -> Counted:
        """The tensors' own bytes."""
        return Counted(value_bytes=sum(value.nbytes for value in self.state.values()))

    @staticmethod
    def describe(header: Any) -> list[str]:
        """Its entries, and how it is coded."""
        return words.named(header)


def give(message: Any, received: Any) -> None:
    """Overwrite a message's dense tensors, in place, with those that its receivers have."""
    for ours, theirs in zip(leaves_of(message), leaves_of(received), strict=True):
        for name, tensor in ours.value.state.items() if isinstance(ours.value, Dense) else ():
            received_tensor = theirs.value.state[name].to(tensor.device)
            if not torch.equal(tensor, received_tensor):
                tensor.copy_(received_tensor)
