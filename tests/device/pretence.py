"""A device of tests' own, `pretend`: its tensors compute on the CPU, and as a GPU's do they refuse to be mixed with
the CPU's.

It cannot be taken back and it starts autograd's threads, so it is set up in a process of its own. Where PyTorch lets
a GPU's tensors meet the CPU's it is allowed here, too: copies, CPU tensors of no dimension, CPU indices. All random
numbers are the CPU generator's, so that a run gives the same bits as on the CPU.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import library as operators
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._foreach_copy_.default, aten._to_copy.default}
INDEXED = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
}
"""Operators whose second argument, indices, may be of the CPU."""
JOINED = {aten.cat.default, aten.stack.default}
"""Operators that take no CPU tensors of no dimension either."""
FACTORIES = (
    "arange",
    "arange.start",
    "arange.start_step",
    "empty.memory_format",
    "empty_strided",
    "eye",
    "eye.m",
    "linspace",
    "logspace",
    "randperm",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
)
"""Operators that make tensors of none: what others give is made by `empty`, and filled."""


class Pretended(Tensor):
    """A tensor of the device: an empty shell about the CPU tensor that has its values."""

    raw: Tensor
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: Tensor) -> Pretended:
        shell = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        shell.raw = raw
        return shell

    def __repr__(self) -> str:
        return f"{self.raw!r} on {NAME}"

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")
        return self.raw.numpy()

    def tolist(self) -> Any:
        return self.raw.tolist()

    @property
    def data(self) -> Tensor:
        """Sharing values, as `detach` does."""
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, Pretended):
            raise RuntimeError(f"data of {NAME} cannot become another device's in place")
        Tensor.data.__set__(self, value)
        self.raw = value.raw

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            made = Pretended(self.raw.clone()).requires_grad_(self.requires_grad)
            made.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "raw"})
            made.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = made
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        check_devices(func, args, kwargs)
        target = kwargs.get("device")
        here = target is None or torch.device(target).type == NAME
        if target is not None and here:
            kwargs["device"] = "cpu"
        shells = {id(one.raw): one for one in tree_leaves((args, kwargs)) if isinstance(one, Pretended)}
        made = func(*tree_map(_raw, args), **tree_map(_raw, kwargs))
        for shell in shells.values():
            if shell.size() != shell.raw.size() or shell.stride() != shell.raw.stride():
                raise NotImplementedError(f"{NAME} has no {func}: it changes a tensor's shape in place")
        if func is aten.copy_.default:
            return args[0]  # it may be the CPU's
        if not here:
            return made
        return tree_map(lambda one: _shelled(one, shells) if isinstance(one, Tensor) else one, made)


def _shelled(made: Tensor, shells: dict[int, Pretended]) -> Pretended:
    return shells[id(made)] if id(made) in shells else Pretended(made)


def _raw(value: Any) -> Any:
    return value.raw if isinstance(value, Pretended) else value


def check_devices(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises RuntimeError, as a GPU does, for tensors of two devices where the operator takes one's alone."""
    generator = kwargs.get("generator")
    if isinstance(generator, torch.Generator):
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{generator.device.type}'")
    if func in COPIES:
        return
    others = (args[0], *args[2:]) if func in INDEXED and isinstance(args[0], Pretended) else args
    strange = [one for one in tree_leaves((others, kwargs)) if _of_the_cpu(one)]
    named = zip(func._schema.arguments, args, strict=False)
    written = [one for argument, given in named if argument.is_write for one in tree_leaves(given)]
    if any(one.dim() for one in strange) or (func in JOINED and strange) or any(map(_of_the_cpu, written)):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! ({func})"
        )


def _of_the_cpu(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, Pretended)


def _factory(func: Any) -> Callable[..., Tensor]:
    def make(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        kwargs.pop("pin_memory", None)
        check_devices(func, args, kwargs)
        return Pretended(func(*args, **kwargs, device="cpu"))

    return make


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    """What is left of copies where PyTorch asks no tensor's class, as in `torch.tensor`."""
    _raw(to).copy_(_raw(source))
    return to


class _Module(_DummyBackendModule):
    """What `torch.autocast` asks."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def _swapped(swap: Callable[[Tensor, Tensor], None], one: Tensor, other: Tensor) -> None:
    """A parameter that moves keeps what was noted of it, as one does that moves to a GPU."""
    noted = {key: value for key, value in one.__dict__.items() if key not in ("raw", "_is_param")}
    swap(one, other)
    one.__dict__.update(noted)


@functools.cache
def set_up() -> operators.Library:
    """Register the device in this process, and let modules that move to it stay what they are."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    kernels = operators.Library("aten", "IMPL")
    for name in FACTORIES:
        base, _, overload = name.partition(".")
        kernels.impl(name, _factory(getattr(getattr(aten, base), overload or "default")), "PrivateUse1")
    kernels.impl("_copy_from", _copy_from, "PrivateUse1")
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.utils.swap_tensors = functools.partial(_swapped, torch.utils.swap_tensors)
    return kernels
