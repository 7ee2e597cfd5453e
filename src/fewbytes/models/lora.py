"""The settings of LoRA, as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from fewbytes.base.errors import UserError

LIKE = "rank=8, or with more rank=8,alpha=16,targets=q_proj+v_proj"


@dataclass(frozen=True)
class Lora:
    """Adapters of a rank, scaled by alpha/rank (default: alpha = rank), for modules whose names end with one of
    `targets`; by default for every Linear and convolution (without groups) except the model's last layer."""

    rank: int
    alpha: int
    targets: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> Self:
        """From `rank=8,alpha=16,targets=q_proj+v_proj`. Raises UserError."""
        given = dict(part.strip().partition("=")[::2] for part in text.split(","))
        if unknown := given.keys() - {"rank", "alpha", "targets"}:
            raise UserError(f"lora has no option {sorted(unknown)[0]!r}: write it like {LIKE}")
        rank, alpha = given.get("rank", ""), given.get("alpha", given.get("rank", ""))
        if not all(number.isdecimal() and int(number) > 0 for number in (rank, alpha)):
            raise UserError(f"lora needs positive whole numbers for rank and alpha, like {LIKE}, not {text!r}")
        return cls(int(rank), int(alpha), tuple(name for name in given.get("targets", "").split("+") if name))

    def __str__(self) -> str:
        alpha = [f"alpha={self.alpha}"] if self.alpha != self.rank else []
        targets = [f"targets={'+'.join(self.targets)}"] if self.targets else []
        return ",".join([f"rank={self.rank}", *alpha, *targets])
