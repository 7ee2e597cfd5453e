"""Convolutions with kernels generated from a few base kernels (Fed-KGF, Eq. 2), and models with such layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fewbytes.base.errors import UserError
from fewbytes.base.state import State, load_state

CACHED = 1 << 17  # tensor entries that stay in the cache together
ALPHA, BETA = (1e-5, 0.1), (2.0, 10.0)  # ranges of the constants, drawn uniformly


def kernel_bank(base: Tensor, alpha: Tensor, beta: Tensor, signed: bool = True) -> Tensor:
    """All kernels (out, C, k, k) of base kernels (b, C, k, k) and constants alpha, beta (out - b, C, k, k).

    The first b are the base kernels; row b + j is sign(w)(|w|^beta_j + alpha_j) for the base kernel w = base[j mod b],
    0 where w is 0 (Eq. 2). Not `signed`: |w|^beta_j + alpha_j, the paper's ablation.
    """
    count, logs, sign = len(base), base.abs().log2(), base.sign()
    layout = torch.channels_last if base.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    bank = torch.empty(
        (count + len(alpha), *base.shape[1:]), dtype=base.dtype, device=base.device, memory_format=layout
    )
    bank[:count] = base
    for a, b, rows in copies(base, alpha, beta, bank[count:]):
        torch.mul(b, logs[: b.shape[1]], out=rows)
        rows.exp2_().add_(a)
        if signed:
            rows.mul_(sign[: b.shape[1]])
    return bank


def base_gradient(base: Tensor, beta: Tensor, gradient: Tensor, through: bool = True, signed: bool = True) -> Tensor:
    """The gradient (b, C, k, k) of base kernels from that of the whole bank (out, C, k, k).

    dL/dw_i = G_i + sum over j = i mod b of G_{b+j} beta_j |w_i|^(beta_j - 1); the sum only if `through`. Not `signed`:
    the sum times sign(w_i).
    """
    count = len(base)
    if not through:
        return gradient[:count].clone()
    logs, total = base.abs().log2(), torch.zeros_like(base)
    for b, g in copies(base, beta, gradient[count:]):
        total[: b.shape[1]] += (b - 1).mul_(logs[: b.shape[1]]).exp2_().mul_(b).mul_(g).sum(0)
    if not signed:
        total *= base.sign()
    return total.add_(gradient[:count])


def copies(base: Tensor, *generated: Tensor) -> Iterator[list[Tensor]]:
    """Rows (out - b, …) of generated kernels grouped into copies of the base: views (copies, b, …).

    Each view has as many copies as fit in the processor's cache. An incomplete last copy is (1, fewer than b, …).
    """
    count, rows = len(base), len(generated[0])
    whole, step = rows - rows % count, max(1, CACHED // base.numel()) * count
    for start in range(0, whole, step):
        yield [g[start : min(start + step, whole)].unflatten(0, (-1, count)) for g in generated]
    if whole < rows:
        yield [g[whole:].unsqueeze(0) for g in generated]


class _Convolution(torch.autograd.Function):
    """A convolution with generated kernels, which exist only while it computes: backward generates them again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, base: Tensor, bias: Tensor | None, alpha: Tensor, beta: Tensor, how: Any
    ) -> Tensor:
        ctx.save_for_backward(x, base, bias, alpha, beta)
        ctx.how = how
        stride, padding, dilation, _, signed = how
        return F.conv2d(x, kernel_bank(base, alpha, beta, signed), bias, stride, padding, dilation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, base, bias, alpha, beta = ctx.saved_tensors
        stride, padding, dilation, through, signed = ctx.how
        bank = kernel_bank(base, alpha, beta, signed)
        sizes = None if bias is None else list(bias.shape)
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        by_x, by_bank, by_bias = torch.ops.aten.convolution_backward(
            gradient, x, bank, sizes, stride, padding, dilation, False, [0, 0], 1, wanted
        )
        by_base = base_gradient(base, beta, by_bank, through, signed) if wanted[1] else None
        return by_x, by_base, by_bias, None, None, None


@dataclass(frozen=True)
class Kernels:
    """How a model's kernels are generated: as in the paper by default, or one of its ablations."""

    base: int = 16  # b, the number of trained kernels of a layer, which are sent
    seed: int = 0  # for drawing alpha and beta, at every node
    sign: bool = True
    alpha: bool = True
    through: bool = True  # gradients also reach the base kernels through the generated ones
    init: Literal["he", "uniform1"] = "he"  # initial base kernels: He's normal (fan-in), or uniform in [-1, 1]


class GeneratedConv2d(nn.Conv2d):
    """A Conv2d that trains, saves and sends only `weight`, b base kernels (b, C, k, k), and the bias.

    It has no groups and zero padding. alpha and beta (out - b, C, k, k) are drawn from the seed and the layer's number,
    the same at every node. Autocast is disabled for it: bfloat16 would lose alpha and |w|^beta.
    """

    def __init__(self, like: nn.Conv2d, layer: int, how: Kernels) -> None:
        sizes = {name: getattr(like, name) for name in ("kernel_size", "stride", "padding", "dilation")}
        super().__init__(like.in_channels, like.out_channels, **sizes, bias=False, device="meta")
        shape = (how.base, *like.weight.shape[1:])
        self.weight = nn.Parameter(like.weight.new_empty(shape))
        if how.init == "he":
            nn.init.kaiming_normal_(self.weight)
        else:
            nn.init.uniform_(self.weight, -1, 1)
        self.bias = like.bias
        alpha, beta = constants(how.seed, layer, (like.out_channels - how.base, *shape[1:]))
        self.register_buffer("alpha", alpha if how.alpha else torch.zeros_like(alpha), persistent=False)
        self.register_buffer("beta", beta, persistent=False)
        self.through, self.sign = how.through, how.sign

    def forward(self, x: Tensor) -> Tensor:
        """x (n, in, h, w) to (n, out, h', w'): base kernels first, then the generated ones."""
        how = (list(self.stride), list(self.padding), list(self.dilation), self.through, self.sign)
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = _Convolution.apply(
                x.to(self.weight.dtype), self.weight, self.bias, self.alpha, self.beta, how
            )
        return out


@lru_cache(maxsize=256)
def constants(seed: int, layer: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """alpha and beta of a layer, float32, channels-last, shared by all models of a process: do not modify them."""
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, layer])))
    alpha, beta = (torch.from_numpy(rng.uniform(*bounds, size=shape).astype(np.float32)) for bounds in (ALPHA, BETA))
    return alpha.to(memory_format=torch.channels_last), beta.to(memory_format=torch.channels_last)


def with_generated_kernels(model: nn.Module, how: Kernels) -> nn.Module:
    """Replace the model's convolutions of more than `how.base` output channels by generated ones, in place.

    Those of `not_generated` stay. Base kernels come from torch's global generator. Raises UserError if there is none to
    replace, or if kernels are generated already.
    """
    if generated(model):
        raise UserError("the model's kernels are generated already: leave kgf out with a method that generates its own")
    if how.base < 1:
        raise UserError(f"a layer needs at least one base kernel, not {how.base}")
    convolutions = [(name, module) for name, module in model.named_modules() if type(module) is nn.Conv2d]
    kept, learnt = not_generated(model, how.base), dict[Tensor, Tensor]()
    for layer, (name, module) in enumerate(convolutions):
        if name not in kept:
            conv = GeneratedConv2d(module, layer, how)
            conv.weight = learnt.setdefault(module.weight, conv.weight)  # layers with shared kernels keep sharing them
            model.set_submodule(name, conv)
    if not learnt:
        why = "; ".join(f"{name or 'itself'} ({reason})" for name, reason in [*kept.items()][:3])
        raise UserError(
            f"a {type(model).__name__} has no convolution whose kernels {how.base} base kernels could generate"
            + (f": {why}{'; …' if len(kept) > 3 else ''}" if kept else ": it has no Conv2d")
            + "; use fewer, or a model with wider convolutions"
        )
    return model


def generated_network(model: nn.Module, how: Kernels) -> nn.Module:
    """As `with_generated_kernels`, with a recipe for the model's file."""
    model = with_generated_kernels(model, how)
    model.recipe = {"kind": "kgf", "kernels": asdict(how)}  # type: ignore[assignment]
    return model


def network_of(recipe: dict[str, Any], state: State, make: Callable[[int], nn.Module]) -> nn.Module:
    """Rebuild a model from the recipe and state of a file; `make` builds a client's plain model."""
    model = generated_network(make(0), Kernels(**recipe["kernels"]))
    load_state(model, state)
    return model


def with_plain_kernels(model: nn.Module) -> nn.Module:
    """Replace generated convolutions by plain ones with the same kernels, in place."""
    for name, module in list(model.named_modules()):
        if isinstance(module, GeneratedConv2d):
            sizes: Any = {name: getattr(module, name) for name in ("kernel_size", "stride", "padding", "dilation")}
            conv = nn.Conv2d(module.in_channels, module.out_channels, **sizes, bias=False)
            bank = kernel_bank(module.weight.detach(), module.alpha, module.beta, module.sign)  # type: ignore[arg-type]
            conv.weight, conv.bias = nn.Parameter(bank.contiguous()), module.bias
            model.set_submodule(name, conv)
    return model


def generated(model: nn.Module) -> int:
    """The number of base kernels of the model's generated convolutions, 0 without any."""
    return next((len(module.weight) for module in model.modules() if isinstance(module, GeneratedConv2d)), 0)


def not_generated(model: nn.Module, base: int) -> dict[str, str]:
    """Names of the convolutions that cannot be generated from `base` base kernels, with the reason as text."""
    kept: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd) and not isinstance(module, GeneratedConv2d):
            reasons = {
                "transposed": module.transposed,
                f"a {type(module).__name__}": type(module) is not nn.Conv2d,
                "the model itself": not name,
                "frozen": not module.weight.requires_grad,
                "with groups": module.groups > 1,
                "padded with other values than zeros": module.padding_mode != "zeros",
                "padding given by name": isinstance(module.padding, str),
                f"no more than {base} kernels": module.out_channels <= base,
            }
            kept |= {name: next(why for why, holds in reasons.items() if holds)} if any(reasons.values()) else {}
    return kept
