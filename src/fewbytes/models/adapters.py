"""LoRA with peft: W + alpha/rank B A replaces each weight W; A and B are trained, W is frozen. Source: Hu, Shen,
Wallis, Allen-Zhu, Li, Wang, Wang, Chen, "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.

Variants: `core=xs`, LoRA-XS (`fewbytes.models.lora_xs`). `train=B`, FFA-LoRA (Sun, Li, Li, Ding, "Improving LoRA in
Privacy-preserving Federated Learning", ICLR 2024): A stays as drawn, so that the mean of the clients' B A is the mean
of their B, times A. `send=A`, FedSA-LoRA (Guo, Zeng, Wang, Fan, Wang, Qu, "Selective Aggregation for Low-Rank
Adaptation in Federated Learning", ICLR 2025): both are trained, and every client keeps its own B.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.state import mark_own
from fewbytes.models.hugging_face import head_of_transformer
from fewbytes.models.lora import Lora
from fewbytes.models.lora_xs import add_core


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters with the given settings, as a problem stores them."""

    lora: Lora

    @property
    def own(self) -> bool:
        """Whether every client keeps some of the trained entries, which are never sent."""
        return self.lora.own

    def added(self, model: nn.Module, head: bool) -> nn.Module:
        """Add adapters to `model` in place (A from torch's generator, B zero), freeze the rest, and return it. With
        `head` the whole last layer is trained, too. Raises UserError if a module, or none, can be adapted."""
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
                else "Linear or convolution besides the last layer"
            )
            raise UserError(f"a {type(model).__name__} has no {wanted}: lora has nothing to adapt")
        if self.lora.variant == "core=xs":
            _check_decomposable(model, names)
        exactly = "|".join(map(re.escape, names))
        config = LoraConfig(r=self.lora.rank, lora_alpha=self.lora.alpha, target_modules=exactly)
        model.requires_grad_(False)
        try:
            with warnings.catch_warnings(action="ignore"):  # about settings that peft detects on its own
                inject_adapter_in_model(config, model)
        except Exception as error:  # modules that peft cannot adapt
            raise UserError(f"lora cannot be added to a {type(model).__name__}: {one_line(error)}") from None
        for name in names:
            self._vary(model.get_submodule(name))
        for module in last if head else ():
            module.requires_grad_(True)
        return model

    def _vary(self, layer: Any) -> None:
        """Change an adapter of peft into the variant's."""
        for key in list(getattr(layer, "lora_A", ())):
            if self.lora.variant == "core=xs":
                add_core(layer, key)
            elif self.lora.variant == "train=B":
                layer.lora_A[key].requires_grad_(False)
            elif self.lora.own:
                mark_own(layer.lora_B[key])


def _check_decomposable(model: nn.Module, names: Sequence[str]) -> None:
    """Raises UserError for a module whose weight is not one matrix, or a convolution's."""
    for name in names:
        module = model.get_submodule(name)
        if not _is_adaptable(module):
            raise UserError(
                f"core=xs adapts linear layers and convolutions without groups, and {name} is a "
                f"{type(module).__name__}: leave it out of targets"
            )


def _is_target(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _is_adaptable(module: nn.Module) -> bool:
    """Whether a module is adapted by default. Some models of transformers use `Conv1D` as their Linear."""
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return linear or (isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups == 1)


def _in_attention(model: nn.Module, name: str) -> bool:
    """Whether the module belongs to torch's attention, which reads the weight directly and would skip the adapter."""
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention)


def _head(model: nn.Module) -> list[nn.Module]:
    """The last layer: a transformer's modules outside its base, else `classifier`, else the last adaptable module."""
    if (heads := head_of_transformer(model)) is not None:
        return heads
    if isinstance(own := getattr(model, "classifier", None), nn.Module):
        return [own]
    return [module for module in model.modules() if _is_adaptable(module)][-1:]
