"""LoRA: Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, "LoRA: Low-Rank Adaptation of Large Language Models", ICLR
2022: a model's weights W stay as they are, and W + alpha/rank B A is used, of which A and B are trained; by peft."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

from torch import nn

from fewbytes.base.errors import UserError, one_line
from fewbytes.models.hugging_face import head_of_transformer

LIKE = "rank=8, or with more rank=8,alpha=16,targets=q_proj+v_proj"


@dataclass(frozen=True)
class Lora:
    """Adapters of a rank, scaled by alpha/rank (alpha is the rank unless given), on the modules whose names end with
    one of `targets`; by default on every Linear and convolution (without groups) but the model's last layer."""

    rank: int
    alpha: int
    targets: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str) -> Lora:
        """From `rank=8,alpha=16,targets=q_proj+v_proj`. Raises UserError."""
        given = dict(part.strip().partition("=")[::2] for part in text.split(","))
        if strange := given.keys() - {"rank", "alpha", "targets"}:
            raise UserError(f"lora has no {sorted(strange)[0]!r}: it is like {LIKE}")
        rank, alpha = given.get("rank", ""), given.get("alpha", given.get("rank", ""))
        if not all(number.isdecimal() and int(number) > 0 for number in (rank, alpha)):
            raise UserError(f"lora has positive whole numbers for rank and alpha, like {LIKE}, not {text!r}")
        return cls(int(rank), int(alpha), tuple(name for name in given.get("targets", "").split("+") if name))

    def added(self, model: nn.Module, head: bool) -> nn.Module:
        """The model with adapters, A drawn from torch's generator and B zero, and all else frozen; with `head` its last
        layer is trained, too, whole. Changes `model`. Raises UserError if it has no such modules."""
        try:
            with warnings.catch_warnings(action="ignore"):
                from peft import LoraConfig, inject_adapter_in_model
        except ImportError:
            raise UserError("lora needs peft: pip install 'fewbytes[adapters]'") from None
        last = [module for top in _head(model) for module in top.modules()]
        names = [
            name
            for name, module in model.named_modules()
            if name
            and not any(module is each for each in last)
            and (self._meant(name) if self.targets else _takes(module) and not _in_attention(model, name))
        ]
        if not names:
            said = (
                f"module called {' or '.join(self.targets)}" if self.targets else "Linear or convolution but the last"
            )
            raise UserError(f"a {type(model).__name__} has no {said}: lora has nothing to adapt")
        exactly = "|".join(map(re.escape, names))
        config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=exactly)
        model.requires_grad_(False)
        try:
            with warnings.catch_warnings(action="ignore"):  # of what it finds out by itself
                inject_adapter_in_model(config, model)
        except Exception as error:  # modules that peft cannot adapt
            raise UserError(f"lora cannot be added to a {type(model).__name__}: {one_line(error)}") from None
        for module in last if head else ():
            module.requires_grad_(True)
        return model

    def _meant(self, name: str) -> bool:
        return any(name == target or name.endswith(f".{target}") for target in self.targets)


def _takes(module: nn.Module) -> bool:
    """Whether a module is adapted by default. transformers writes some Linears as `Conv1D`."""
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return linear or (isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups == 1)


def _in_attention(model: nn.Module, name: str) -> bool:
    """Whether it is a part of torch's attention, which uses its weight and would not use an adapter."""
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention)


def _head(model: nn.Module) -> list[nn.Module]:
    """The last layer: what a transformer has besides its base, else `classifier`, else the last that takes adapters."""
    if (heads := head_of_transformer(model)) is not None:
        return heads
    if isinstance(own := getattr(model, "classifier", None), nn.Module):
        return [own]
    return [module for module in model.modules() if _takes(module)][-1:]
