"""Convolutions whose kernels are generated from a few base kernels (Fed-KGF, Eq. 2), and models made of such."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fewbytes.errors import UserError

ALPHA, BETA = (1e-5, 0.1), (2.0, 10.0)  # ranges of the constants, which are uniform in them


def kernel_bank(base: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """All kernels (out, C, k, k) of base kernels (b, C, k, k) and constants alpha, beta (out - b, C, k, k).

    The first b are the base kernels; row b + j is sign(w)(|w|^beta_j + alpha_j) for the base kernel w = base[j mod b],
    0 where w is 0 (Eq. 2).
    """
    count, (sign, logs) = len(base), (base.sign(), base.abs().log2())
    bank = base.new_empty(count + len(alpha), *base.shape[1:])
    bank[:count] = base
    for a, b, rows in zip(alpha.split(count), beta.split(count), bank[count:].split(count), strict=True):
        torch.mul(b, logs[: len(b)], out=rows)  # a copy of the base at a time, so that it stays in the cache
        rows.exp2_().add_(a).mul_(sign[: len(b)])
    return bank


def base_gradient(base: Tensor, beta: Tensor, gradient: Tensor, through: bool = True) -> Tensor:
    """The gradient (b, C, k, k) of base kernels from that of the whole bank (out, C, k, k).

    dL/dw_i = G_i + sum over j = i mod b of G_{b+j} beta_j |w_i|^(beta_j - 1); `through`: with the sum.
    """
    count, logs = len(base), base.abs().log2()
    total = gradient[:count].clone(memory_format=torch.contiguous_format)
    if through:
        for b, g in zip(beta.split(count), gradient[count:].split(count), strict=True):
            total[: len(b)] += (b - 1).mul_(logs[: len(b)]).exp2_().mul_(b).mul_(g)
    return total


class _Convolution(torch.autograd.Function):
    """A convolution with the bank's kernels, which exist only while it computes: backward makes them anew."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, base: Tensor, bias: Tensor | None, alpha: Tensor, beta: Tensor, how: Any
    ) -> Tensor:
        ctx.save_for_backward(x, base, bias, alpha, beta)
        ctx.how = how
        stride, padding, dilation, _ = how
        return F.conv2d(x, kernel_bank(base, alpha, beta), bias, stride, padding, dilation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, base, bias, alpha, beta = ctx.saved_tensors
        stride, padding, dilation, through = ctx.how
        bank = kernel_bank(base, alpha, beta)
        sizes = None if bias is None else list(bias.shape)
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        by_x, by_bank, by_bias = torch.ops.aten.convolution_backward(
            gradient, x, bank, sizes, stride, padding, dilation, False, [0, 0], 1, wanted
        )
        by_base = base_gradient(base, beta, by_bank, through) if wanted[1] else None
        return by_x, by_base, by_bias, None, None, None


class GeneratedConv2d(nn.Module):
    """A Conv2d of which only `weight`, b base kernels (b, C, k, k), and the bias are learnt, saved and sent.

    Without groups, padded with zeros. alpha and beta (out - b, C, k, k) are drawn from the seed and the layer's number,
    the same at every node. `through`: gradients reach the base kernels through the generated ones, too.
    """

    def __init__(self, like: nn.Conv2d, base: int, seed: int, layer: int, through: bool = True) -> None:
        super().__init__()
        shape = (base, *like.weight.shape[1:])
        self.weight = nn.Parameter(like.weight.new_empty(shape))
        nn.init.kaiming_normal_(self.weight)
        self.bias = None if like.bias is None else nn.Parameter(like.bias.detach().clone())
        alpha, beta = constants(seed, layer, (like.out_channels - base, *shape[1:]))
        self.register_buffer("alpha", alpha, persistent=False)
        self.register_buffer("beta", beta, persistent=False)
        self.how = (list(like.stride), list(like.padding), list(like.dilation), through)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Convolution.apply(x, self.weight, self.bias, self.alpha, self.beta, self.how)
        return out


@lru_cache(maxsize=256)
def constants(seed: int, layer: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """alpha and beta of a layer, float32, shared by all models of a process: do not change them."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, layer])))
    alpha, beta = (torch.from_numpy(rng.uniform(*bounds, size=shape).astype(np.float32)) for bounds in (ALPHA, BETA))
    return alpha, beta


def with_generated_kernels(model: nn.Module, base: int = 16, seed: int = 0, through: bool = True) -> nn.Module:
    """The model, its convolutions of more than `base` output channels replaced by generated ones, in place.

    Those with groups, with padding by name or not by zeros, and transposed ones are left alone. Base kernels are drawn
    from torch's global generator. Raises UserError if none is left to replace.
    """
    convolutions = [(name, module) for name, module in model.named_modules() if type(module) is nn.Conv2d]
    replaced = 0
    for layer, (name, module) in enumerate(convolutions):
        plain = module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
        if plain and module.out_channels > base and name:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, GeneratedConv2d(module, base, seed, layer, through))
            replaced += 1
    if not replaced:
        raise UserError(f"a {type(model).__name__} has no convolution of more than {base} channels to generate")
    return model
