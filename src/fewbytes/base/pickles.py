"""Pickles read as plain data: a pickle is a program for a stack machine, which runs here without calling anything.

NVIDIA's generators are pickles that contain the source code of their classes, which unpickling would run; CIFAR is
distributed as pickles, too. A stack machine of our own follows the instructions here. Each call in a pickle is one of a
few known constructors of tensors, arrays and containers, or (in networks) becomes a `Record`, or is refused by name.
"""

from __future__ import annotations

import io
import math
import mmap
import pickletools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from pickletools import markobject
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewbytes.base.errors import UserError

INSTRUCTIONS = 1_000_000  # real files have up to 300,000; each costs one byte of file, and up to a hundred of memory


@dataclass(eq=False)
class Record:
    """A placeholder for a class, a function or an object: its name, and the object's attributes. It does nothing."""

    name: str
    state: dict[str, Any] = field(default_factory=dict)


def read_pickle(path: Path) -> Any:
    """The contents of a pickle of networks (protocol 3 or later): containers, numbers, tensors, arrays, `Record`s.

    Modules and other objects of PyTorch and of the networks' own packages become records, sets become lists; class
    sources are dropped. Peak memory: up to twice the file's size, or about 100 MB more. Raises UserError for a file
    that is not a pickle, is damaged, or names anything else.
    """
    return _read(path, _Machine(_networks(), _RECORDS), b"\x80")


def read_arrays(path: Path) -> Any:
    """The contents of a pickle of Python 2, or of protocol 3 or later: containers, numbers, text, NumPy arrays.

    Python 2's strings become bytes. Memory and errors: see `read_pickle`.
    """
    return _read(path, _Machine(_arrays(), set()))


def _read(path: Path, machine: _Machine, start: bytes = b"") -> Any:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if not content[:1].startswith(start):
                raise UserError("is not a pickle (of protocol 3 or later)")
            return machine.run(content)
    except UserError as error:
        raise UserError(f"{path} {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # the instructions come from the file, and so does any error in following them
        raise UserError(f"{path} is a damaged or truncated pickle, or none") from error


_LITERALS = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}  # Python 2's strings, which pickletools decodes as Latin-1
# Calls that become records. StyleGAN-XL's discriminators have hooks, which dill writes as functions to reassemble.
_RECORDS = {
    "torch", "torchvision", "timm", "dnnlib", "torch_utils", "training", "pg_modules", "feature_networks", "dill",
    "builtins.getattr", "builtins.setattr",
}  # fmt: skip


class _Machine:
    """The stack machine of the pickle format.

    `meanings`: functions that replace calls, by name; calls of packages and names in `records` become `Record`s.
    """

    def __init__(self, meanings: Mapping[str, Callable[..., Any]], records: Set[str]) -> None:
        self._meanings, self._records = meanings, records
        self._steps: dict[str, Callable[..., Any]] = _STEPS | {
            "STACK_GLOBAL": self._named, "REDUCE": self._call, "NEWOBJ": self._call,
            "NEWOBJ_EX": lambda called, arguments, _: self._call(called, arguments),
        }  # fmt: skip

    def run(self, stream: Any) -> Any:
        """Follow the instructions up to STOP and return the top of the stack."""
        stack: list[Any] = []
        outer: list[list[Any]] = []  # the stacks below each mark
        memo: dict[int, Any] = {}
        argument: Any
        for count, (code, argument, _) in enumerate(pickletools.genops(stream)):
            if count == INSTRUCTIONS:
                raise UserError(f"has more than {INSTRUCTIONS} instructions, which no such file needs")
            match code.name:
                case name if name in _LITERALS:
                    stack.append(argument)
                case name if name in _STRINGS:
                    stack.append(argument.encode("latin-1"))
                case "PROTO" | "FRAME" | "BINPERSID":  # a persistent identifier becomes the object it identifies
                    pass
                case "PUT" | "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "GET" | "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "DUP":
                    stack.append(stack[-1])
                case "MARK":
                    outer.append(stack)
                    stack = []
                case "GLOBAL":
                    stack.append(self._named(*argument.split(" ", 1)))
                case "STOP":
                    return stack.pop()
                case name:
                    taken, marked = code.stack_before, []
                    if markobject in taken:
                        taken, marked, stack = taken[: taken.index(markobject)], [stack], outer.pop()
                    values = [stack.pop() for _ in taken]
                    result = self._steps[name](*reversed(values), *marked)
                    if code.stack_after:
                        stack.append(result)
        return _fail("no end")  # pragma: no cover (genops raises first)

    def _named(self, module: str, attribute: str) -> Record:
        name = f"{_name(module)}.{_name(attribute)}".replace("numpy._core.", "numpy.core.")
        if module.startswith("dnnlib.tflib"):
            raise UserError("is a pickle of the TensorFlow StyleGAN, which is not supported")
        if name not in self._meanings and not {name, module.partition(".")[0]} & self._records:
            raise UserError(f"asks for {name!r}, which no such file needs: refused, nothing was run")
        return Record(name)

    def _call(self, called: Any, arguments: tuple[Any, ...]) -> Any:
        name = called.name if isinstance(called, Record) else ""
        return self._meanings[name](*arguments) if name in self._meanings else Record(name)


def _fail(reason: str) -> Any:
    raise ValueError(reason)


def _name(text: Any) -> str:
    """A dotted name, short enough for a message."""
    if not isinstance(text, str) or len(text) > 100 or not all(part.isidentifier() for part in text.split(".")):
        _fail("no name")
    return str(text)


def _sizes(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, tuple) or len(numbers) > 8 or not all(isinstance(n, int) for n in numbers):
        _fail("no sizes")
    return tuple(numbers)


def _extend(target: Any, values: list[Any]) -> Any:
    if isinstance(target, list):
        target.extend(values)
    elif not isinstance(target, Record):  # a record of a class derived from list: its items are dropped
        _fail("items for something that is not a list")
    return target


def _set_items(target: Any, pairs: Sequence[Any]) -> Any:
    if isinstance(target, Record):
        return target
    keys, values = pairs[::2], pairs[1::2]
    # No tuples: none is ever hashed, compared or printed, which takes for ever for tuples of the same tuples of ...
    if not isinstance(target, dict) or not all(
        key is None or isinstance(key, str | bytes | int | float) for key in keys
    ):
        _fail("no dictionary, or an unsupported key")
    target.update(zip(keys, values, strict=True))
    return target


def _build(target: Any, state: Any) -> Any:
    """Set an object's attributes. Nothing is copied: one dictionary for many objects would fill the memory."""
    match target:
        case Record():
            target.state = state if isinstance(state, dict) else {}
        case np.ndarray():
            _, shape, dtype, _, content = state
            if not isinstance(dtype, np.dtype) or not isinstance(content, bytes):
                _fail("an array of something else")
            if math.prod(_sizes(shape)) * dtype.itemsize != len(content):
                _fail("an array of another size")
            target.__setstate__(state)
        case np.dtype():
            if state[1] not in ("<", "|", b"<", b"|") or state[2:5] != (None, None, None):
                _fail("numbers that are not little-endian")
        case dict():
            pass  # attributes of a dictionary are dropped
        case _:
            _fail("attributes for something that has none")
    return target


_STEPS: dict[str, Callable[..., Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_SET": list, "EMPTY_DICT": dict,
    "TUPLE": tuple, "FROZENSET": tuple, "LIST": list, "DICT": lambda pairs: _set_items({}, pairs),
    "TUPLE1": lambda *items: items, "TUPLE2": lambda *items: items, "TUPLE3": lambda *items: items,
    "APPEND": lambda target, value: _extend(target, [value]), "APPENDS": _extend, "ADDITEMS": _extend,
    "SETITEM": lambda target, *pair: _set_items(target, pair), "SETITEMS": _set_items,
    "BUILD": _build, "POP": lambda _: None, "POP_MARK": lambda _: None,
}  # fmt: skip
"""Functions for the other instructions; arguments are the values they pop, those above a mark as one list."""


def _arrays() -> dict[str, Callable[..., Any]]:
    """Functions that replace the known calls of NumPy."""
    return {
        "numpy.ndarray": _fail,
        "numpy.core.multiarray._reconstruct": lambda *_: np.empty(0, np.int8),
        "numpy.core.numeric._frombuffer": lambda content, dtype, shape, _: _array(content, dtype).reshape(shape),
        "numpy.core.multiarray.scalar": lambda dtype, content: _array(content, dtype)[0].item(),
        "numpy.dtype": _dtype,
    }


def _networks() -> dict[str, Callable[..., Any]]:
    """Functions that replace the known calls in networks."""
    storages: dict[bytes, Tensor] = {}  # so that a storage used many times is in memory once

    def storage(payload: bytes) -> Tensor:
        if not isinstance(payload, bytes):
            _fail("a storage of something else")
        if payload not in storages:
            storages[payload] = _storage(payload)
        return storages[payload]

    return _arrays() | {
        "torch_utils.persistence._reconstruct_persistent_obj": _persistent,
        "dnnlib.util.EasyDict": dict,
        "collections.OrderedDict": dict,
        "builtins.set": lambda items: items,
        "__builtin__.set": lambda items: items,
        "torch.storage._load_from_bytes": storage,
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_parameter": lambda data, *_: data,
        "dill._dill._create_array": lambda _made, _by, state, *_: _build(np.empty(0, np.int8), state),
    }


def _persistent(meta: dict[str, Any]) -> Record:
    """An object of a class that is stored as source code, which is not read."""
    return Record(_name(meta["class_name"]), meta["state"] if isinstance(meta["state"], dict) else {})


def _dtype(code: str | bytes, *_: Any) -> np.dtype[Any]:
    code = code.decode("latin-1") if isinstance(code, bytes) else code
    known = ["b1", "i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8"]
    return np.dtype(code) if isinstance(code, str) and code in known else _fail("a dtype")


def _array(content: bytes, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    return np.frombuffer(content, dtype) if isinstance(dtype, np.dtype) else _fail("a dtype")


_STORAGES = {
    "torch.FloatStorage": torch.float32, "torch.DoubleStorage": torch.float64, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}  # fmt: skip


def _storage(payload: bytes) -> Tensor:
    """The numbers of one storage, as `torch.save` wrote it before it wrote zip files.

    The format: five pickles (magic number, version, system, storage id, its key), an int64 count, the numbers.
    """
    stream = io.BytesIO(payload)
    machine = _Machine({}, _RECORDS)
    magic, version, system, identifier, keys = [machine.run(stream) for _ in range(5)]
    kind, called, key, _, count, view = identifier
    dtype = _STORAGES[called.name]
    written = int.from_bytes(stream.read(8), "little")
    content = bytearray(stream.read())
    header = magic, version, kind, view
    if header != (0x1950A86A20F9469CFC6C, 1001, "storage", None) or not isinstance(key, str) or keys != [key]:
        _fail("no storage")
    if not system["little_endian"] or written != count or len(content) != count * dtype.itemsize:
        _fail("a storage of another size")
    return torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)


def _tensor(storage: Tensor, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Tensor:
    if math.prod(_sizes(size)) > len(storage):  # with a stride of 0 a small storage could become a huge tensor
        _fail("a tensor that is larger than its storage")
    return storage.as_strided(size, stride, offset)
