"""Class weights, as written in settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from fewbytes.base.errors import UserError
from fewbytes.base.units import plain


@dataclass(frozen=True)
class ClassWeights:
    """A weight in the loss for `each` class; empty: balanced, by a client's class frequencies."""

    each: tuple[float, ...] = ()

    @classmethod
    def read(cls, text: str) -> Self:
        """`1,5,1`, or `balanced`. Raises UserError for anything else."""
        if text.strip() == "balanced":
            return cls()
        try:
            return cls(tuple(float(part) for part in text.split(",")))
        except ValueError:
            raise UserError(
                f"class_weights is balanced, or a number for each class, like 1,5,1, not {text!r}"
            ) from None

    def __str__(self) -> str:
        return ",".join(map(plain, self.each)) or "balanced"
