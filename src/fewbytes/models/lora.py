"""The settings of LoRA, as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from fewbytes.base.errors import UserError

LIKE = "rank=8, or with more rank=8,alpha=16,targets=q_proj+v_proj, and core=xs, train=B or send=A"
VARIANTS = {"core": "xs", "train": "B", "send": "A"}
"""By option: its only value. Each option makes another variant of LoRA."""


@dataclass(frozen=True)
class Lora:
    """Adapters of a rank, scaled by alpha/rank (default: alpha = rank), for modules whose names end with one of
    `targets`; by default for every Linear and convolution (without groups) except the model's last layer.

    `variant`: empty, or `core=xs` (LoRA-XS), `train=B` (FFA-LoRA) or `send=A` (FedSA-LoRA); see
    `fewbytes.models.adapters`.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...] = ()
    variant: str = ""

    @property
    def own(self) -> bool:
        """Whether clients keep one of the matrices."""
        return self.variant == "send=A"

    @classmethod
    def read(cls, text: str) -> Self:
        """From `rank=8,alpha=16,targets=q_proj+v_proj,core=xs`. Raises UserError."""
        given = dict(part.strip().partition("=")[::2] for part in text.split(","))
        if unknown := given.keys() - {"rank", "alpha", "targets", *VARIANTS}:
            raise UserError(f"lora has no option {sorted(unknown)[0]!r}: write it like {LIKE}")
        rank, alpha = given.get("rank", ""), given.get("alpha", given.get("rank", ""))
        if not all(number.isdecimal() and int(number) > 0 for number in (rank, alpha)):
            raise UserError(f"lora needs positive whole numbers for rank and alpha, like {LIKE}, not {text!r}")
        targets = tuple(name for name in given.get("targets", "").split("+") if name)
        return cls(int(rank), int(alpha), targets, _variant(given))

    def __str__(self) -> str:
        alpha = [f"alpha={self.alpha}"] if self.alpha != self.rank else []
        targets = [f"targets={'+'.join(self.targets)}"] if self.targets else []
        variant = [self.variant] if self.variant else []
        return ",".join([f"rank={self.rank}", *alpha, *targets, *variant])


def _variant(given: dict[str, str]) -> str:
    """The one option that makes a variant, as it is written. Raises UserError for another value, and for two."""
    found = [f"{option}={given[option]}" for option in VARIANTS if option in given]
    for option, value in VARIANTS.items():
        if given.get(option, value) != value:
            raise UserError(f"lora takes {option}={value}, not {option}={given[option]}")
    if len(found) > 1:
        raise UserError(f"lora takes one of {' and '.join(found)}, which are different variants: leave one out")
    return "".join(found)
