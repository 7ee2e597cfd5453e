"""Checks of the entries of users' models."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fewbytes.base.errors import UserError
from fewbytes.base.state import EXTRA, all_entries
from fewbytes.wire.layout import DTYPES


def check_entries(model: nn.Module) -> None:
    """Raises UserError for a model whose entries have unknown shapes, or types that cannot travel."""
    for name, module in model.named_modules():
        if any(is_lazy(value) for value in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise UserError(
                f"{named_module(name, module)} is lazy, its shapes are not known until it is used: give it its sizes, "
                "or call the model on a sample in the function that makes it"
            )
        if any(value.is_meta for value in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise UserError(f"{named_module(name, module)} is on the meta device, without values: make it on the CPU")
    for name, value in all_entries(model).items():
        if value.layout != torch.strided:
            raise UserError(
                f"{kind_of(name, value)} {name!r} of the model is {value.layout}, which cannot travel: keep it dense, "
                "or, if it is constant, register_buffer(…, persistent=False)"
            )
        if (dtype := str(value.dtype).removeprefix("torch.")) not in DTYPES:
            real = "keep real and imaginary parts (torch.view_as_real)" if value.is_complex() else "keep another type"
            raise UserError(
                f"{kind_of(name, value)} {name!r} of the model is {dtype}, which cannot travel: {real}, or, of a "
                "constant, register_buffer(…, persistent=False)"
            )


def unexpand(model: nn.Module) -> None:
    """Replace expanded buffers, which share one value in memory, by loadable copies."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.layout == torch.strided and 0 in buffer.stride():
                module._buffers[name] = buffer.contiguous()


def kind_of(name: str, value: Tensor) -> str:
    """The kind of an entry, in words."""
    return "extra state" if name.endswith(EXTRA) else "parameter" if isinstance(value, nn.Parameter) else "buffer"


def named_module(name: str, module: nn.Module) -> str:
    """A module of a model, for error texts."""
    return f"module {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
