"""LoRA: Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, "LoRA: Low-Rank Adaptation of Large Language Models", ICLR
2022: a model's weights W stay as they are, and W + alpha/rank B A is used, of which A and B are trained; by peft."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fewbytes.base.errors import UserError, one_line
from fewbytes.models.hugging_face import head_of_transformer
from fewbytes.models.lora import Lora


@dataclass(frozen=True)
class Adapters:
    """Adapters by these terms, as a problem holds them."""

    lora: Lora

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
            and (
                _is_target(name, self.lora.targets)
                if self.lora.targets
                else _is_adaptable(module) and not _in_attention(model, name)
            )
        ]
        if not names:
            wanted = (
                f"module called {' or '.join(self.lora.targets)}"
                if self.lora.targets
                else "Linear or convolution but the last"
            )
            raise UserError(f"a {type(model).__name__} has no {wanted}: lora has nothing to adapt")
        exactly = "|".join(map(re.escape, names))
        config = LoraConfig(r=self.lora.rank, lora_alpha=self.lora.alpha, target_modules=exactly)
        model.requires_grad_(False)
        try:
            with warnings.catch_warnings(action="ignore"):  # of what it finds out by itself
                inject_adapter_in_model(config, model)
        except Exception as error:  # modules that peft cannot adapt
            raise UserError(f"lora cannot be added to a {type(model).__name__}: {one_line(error)}") from None
        for module in last if head else ():
            module.requires_grad_(True)
        return model


def _is_target(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _is_adaptable(module: nn.Module) -> bool:
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
    return [module for module in model.modules() if _is_adaptable(module)][-1:]
