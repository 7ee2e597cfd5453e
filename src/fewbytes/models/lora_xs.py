"""LoRA-XS: Balazy, Banaei, Aberer, Tabor, "LoRA-XS: Low-Rank Adaptation with Extremely Small Number of Parameters",
arXiv 2405.17604, 2024. With the truncated singular value decomposition W ~ U S V^T of a frozen weight, W + alpha/rank
(U S) R V^T replaces W, and only the rank x rank matrix R is trained.

U S takes the place of LoRA's B, and R V^T that of its A. R starts at zero, so the first model equals the base model
bit for bit. The paper draws tiny numbers; zero learns as well, since both factors beside R are not zero.

Both ends of the wire compute the factors from the weights. Their last bits depend on the library and the number of
threads, so the decomposition is in float64 and rounded to bfloat16's 8 bits: different processors then agree, too.
Adapters need no more, as R adapts to the factors it gets.
"""

from __future__ import annotations

from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from fewbytes.base.cores import one_core

MOST = 1024  # decompositions in memory, as every new copy of a model needs those of all its weights
_decomposed: dict[tuple[str, tuple[int, ...], int], tuple[Tensor, Tensor]] = {}


class Core(nn.Sequential):
    """The frozen `factor` V^T, then the trained `core` R, in place of the A of an adapter of peft."""

    def __init__(self, factor: nn.Module, core: nn.Module) -> None:
        super().__init__()
        self.factor, self.core = factor, core

    @property
    def weight(self) -> Tensor:
        """R V^T, in the shape of A's weight, as peft reads it."""
        factor: Any = self.factor.weight
        core: Any = self.core.weight
        weight: Tensor = (core.flatten(1) @ factor.flatten(1)).view_as(factor)
        return weight


def add_core(layer: Any, name: str) -> None:
    """Change the adapter `name` of a layer of peft into one of LoRA-XS, in place; its rank is at most the rank of the
    layer's weight."""
    a, b, base = layer.lora_A[name], layer.lora_B[name], layer.get_base_layer()
    weight = base.weight.detach()
    left, right = factors(weight.T if type(base).__name__ == "Conv1D" else weight, layer.r[name])
    rank = len(right)
    a.weight = nn.Parameter(right.view(rank, *a.weight.shape[1:]).to(a.weight), requires_grad=False)
    b.weight = nn.Parameter(left.view(-1, rank, *b.weight.shape[2:]).to(b.weight), requires_grad=False)
    if isinstance(a, nn.Linear):
        a.out_features = b.in_features = rank
        core: Any = nn.Linear(rank, rank, bias=False)
    else:
        a.out_channels = b.in_channels = rank
        core = type(a)(rank, rank, 1, bias=False)
    nn.init.zeros_(core.weight)
    layer.lora_A[name] = Core(a, core.to(a.weight))


def factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U S and V^T of a weight (outputs, …), of at most `rank` singular values, the largest first: float32, of numbers
    that bfloat16 has. Of the two signs of a pair, the one where the largest entry of its row of V^T is positive."""
    matrix = weight.flatten(1).double()
    if matrix.is_meta:
        rank = min(rank, *matrix.shape)
        return matrix.new_empty(len(matrix), rank), matrix.new_empty(rank, matrix.shape[1])
    key = (blake3(matrix.contiguous().numpy().tobytes()).hexdigest(), tuple(matrix.shape), rank)
    if key not in _decomposed:
        with one_core():
            u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
        left, right = (u * s)[:, :rank].bfloat16().float(), vt[:rank].bfloat16().float()
        sign = right.gather(1, right.abs().argmax(1, keepdim=True)).sign()
        while len(_decomposed) >= MOST:
            del _decomposed[next(iter(_decomposed))]
        _decomposed[key] = left * sign.T, right * sign
    return _decomposed[key]


def with_plain_adapters(model: nn.Module) -> nn.Module:
    """Replace LoRA-XS's adapters by ordinary ones of LoRA with the same product, A = R V^T and B = U S, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Core):
            plain: Any = module.factor
            plain.weight = nn.Parameter(module.weight.detach().contiguous())
            model.set_submodule(name, plain)
    return model
