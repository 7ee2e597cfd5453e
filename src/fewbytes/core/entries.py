"""What of a model cannot be trained by many or cannot travel, in one line that names it and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from fewbytes.base.errors import UserError
from fewbytes.base.state import State, all_entries, copied, frozen_entries, trained_entries, trained_parameters
from fewbytes.core.training import Local
from fewbytes.wire.layout import DTYPES

Entries = dict[str, tuple[bool, Tensor]]
"""By name whether an entry travels, and a copy of it."""


def check_entries(model: nn.Module) -> None:
    """Raises UserError for a model with entries of unknown shapes, or of types that cannot travel."""
    for name, module in model.named_modules():
        if any(is_lazy(value) for value in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise UserError(
                f"{_module(name, module)} is lazy, its shapes are not known until it is used: give it its sizes, or "
                "call the model on a sample in the function that makes it"
            )
    for name, value in all_entries(model).items():
        if (dtype := str(value.dtype).removeprefix("torch.")) not in DTYPES:
            real = "keep real and imaginary parts (torch.view_as_real)" if value.is_complex() else "keep another type"
            raise UserError(
                f"{_kind(value)} {name!r} of the model is {dtype}, which cannot travel: {real}, or, of a constant, "
                "register_buffer(…, persistent=False)"
            )


def check_apart(one: nn.Module, other: nn.Module) -> None:
    """Raises UserError if two models that a task's function made have a trained entry in common, and for trained values
    that are not finite from the start."""
    entries = trained_entries(one)
    shared = {id(value) for value in (*other.parameters(), *other.buffers())}
    name = next((name for name, value in entries.items() if id(value) in shared), None)
    if name is not None:
        raise UserError(
            f"the function that makes the model gives the same {'module' if one is other else repr(name)} each time, "
            "so that clients would train one another's: let it make a new one, lambda: MyModel() or "
            "lambda: copy.deepcopy(model)"
        )
    for name, p in trained_parameters(one).items():
        if not p.isfinite().all():
            raise UserError(
                f"parameter {name!r} of the model holds numbers that are not finite, before any training: give it "
                "finite ones, or, if it is constant, make it a buffer (register_buffer)"
            )


def check_float32(model: nn.Module, method: str) -> None:
    """Raises UserError for a model of which anything that is trained is of other numbers than float32."""
    for name, value in trained_entries(model).items():
        if value.is_floating_point() and value.dtype != torch.float32:
            raise UserError(
                f"{method} computes in float32, and {_kind(value)} {name!r} of the model is "
                f"{str(value.dtype).removeprefix('torch.')}: let the model be of float32 (precision='bf16' computes in "
                "bfloat16 all the same), or take another method"
            )


def check_optimiser(model: nn.Module, local: Local | None) -> None:
    """Raises UserError for Adam on float16, in which its epsilon is 0, so that a gradient of 0 is divided by 0."""
    if local is None or local.optimiser not in ("adam", "adamw"):
        return
    for name, p in trained_parameters(model).items():
        if p.dtype == torch.float16:
            raise UserError(
                f"{local.optimiser} does not work on float16, as parameter {name!r} of the model is (its epsilon, "
                "1e-8, is 0 there): let the model be of bfloat16 or float32, or take another optimiser"
            )


def kept(model: nn.Module) -> Entries:
    """The model's entries as they are now."""
    travel = trained_entries(model).keys()
    return {name: (name in travel, copied(value)) for name, value in all_entries(model).items()}


def check_unchanged(model: nn.Module, before: Entries) -> None:
    """Raises UserError for a model that its use has given other entries or shapes than `before`, or of which it has
    changed what does not travel."""
    now: State = all_entries(model)
    if others := now.keys() ^ before.keys():
        raise UserError(
            f"the model makes or drops {min(others)!r} as it is used: make all of it in __init__, or call the model on "
            "a sample in the function that makes it"
        )
    still = frozen_entries(model)
    for name, (travelled, old) in before.items():
        new = now[name]
        if new.shape != old.shape:
            raise UserError(
                f"{_kind(new)} {name!r} of the model changes its shape in training, from {tuple(old.shape)} to "
                f"{tuple(new.shape)}: call the model on a sample in the function that makes it, so that it has its own "
                "from the start"
            )
        if not travelled and name in still and not torch.equal(_plain(new), _plain(old)):
            why = "is not trained" if isinstance(new, nn.Parameter) else "does not travel"
            if not old.isfinite().all():
                why = "begins with numbers that are not finite, which have no mean,"
            raise UserError(
                f"{_kind(new)} {name!r} of the model {why} and changes in training, so that clients would have "
                "different ones: keep it as it is, or let it travel (a parameter with requires_grad, a buffer that "
                "begins with finite numbers)"
            )


def _plain(value: Tensor) -> Tensor:
    return value.detach().cpu().nan_to_num()


@contextmanager
def entered(model: nn.Module) -> Iterator[list[str]]:
    """While it lasts, the modules that the model is in, outermost first; where a pass fails, the last is where."""
    within: list[str] = []
    handles = []
    for name, module in model.named_modules():
        said = _module(name, module)
        handles += [
            module.register_forward_pre_hook(lambda *_, said=said: within.append(said)),
            module.register_forward_hook(lambda *_: within.pop() and None),
        ]
    try:
        yield within
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def normalised(model: nn.Module) -> Iterator[list[str]]:
    """While it lasts, the batch normalisations that see a single value a channel of each sample's maps in training."""
    seen: list[str] = []

    def look(said: str, inputs: tuple[Any, ...]) -> None:
        if isinstance(x := inputs[0] if inputs else None, Tensor) and x.dim() > 2 and prod(x.shape[2:]) == 1:
            seen.append(said)

    handles = [
        module.register_forward_pre_hook(lambda module, inputs, said=name: look(said, inputs))
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.training
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _kind(value: Tensor) -> str:
    return "parameter" if isinstance(value, nn.Parameter) else "buffer"


def _module(name: str, module: nn.Module) -> str:
    return f"module {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
