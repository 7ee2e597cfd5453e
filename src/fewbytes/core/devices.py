"""Devices and precisions for computing: checks, and settings of GPUs."""

from __future__ import annotations

import functools
import os
import platform
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from fewbytes.base.errors import UserError

Precision = Literal["float32", "bf16", "tf32"]
"""float32: IEEE's, on GPUs too; bf16: forward passes in mixed bfloat16; tf32: a GPU's shorter float32."""


def check_device(device: str) -> None:
    """Raises UserError for a device that this machine lacks."""
    if str(device).split(":")[0] not in ("cpu", "cuda"):
        raise UserError(f"device {device!r} is neither cpu nor cuda")
    if why := _why_not(device):
        raise UserError(f"device {device!r} cannot be used here: {why}: use cpu")


def _why_not(device: str) -> str:
    """The error of creating a tensor on a device; empty if it works.

    While no GPU is open here, a forked process tries it: after opening one here, forked workers could not use it. If it
    fails there, this process tries: forks cannot use CUDA once this process has queried it.
    """
    if torch.device(device).type != "cpu" and not torch.cuda.is_initialized() and hasattr(os, "fork"):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.write(write_end, _tried(device).encode())
            finally:
                os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, encoding="utf-8") as answer:
            why = answer.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            return f"the process that tried it ended with {code}"
        return why and _tried(device)
    return _tried(device)


def _tried(device: str) -> str:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return ""


def prepare_device(device: str, precision: Precision) -> None:
    """Make this process's GPU compute reproducibly, as `precision` says; a CPU does anyway.

    By default, GPU convolutions round float32 to TF32's 10 bits, and some GPU kernels add in varying order.
    """
    if torch.device(device).type != "cuda":
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; for reproducibility
    short = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = short
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def open_device(device: str) -> None:
    """Open a GPU in this process, whose workers are forked, so that later seeding covers it."""
    if torch.device(device).type == "cuda":
        torch.cuda.init()


def check_precision(precision: Precision, device: str) -> None:
    """Raises UserError for tf32 on a CPU; warns of a CPU without bfloat16, on which bf16 is slow."""
    kind = torch.device(device).type
    if precision == "tf32" and kind != "cuda":
        raise UserError("precision tf32 needs a GPU: use float32, or device cuda")
    if precision == "bf16" and kind == "cpu" and not _has_bfloat16():
        warnings.warn("this processor has no bfloat16: bf16 is slower here than float32", UserWarning, stacklevel=2)


@functools.cache
def _has_bfloat16() -> bool:
    """Assumed for CPUs other than Intel's and AMD's, whose features are unknown."""
    return platform.machine() not in ("x86_64", "AMD64") or bool(torch.cpu._is_avx512_bf16_supported())


def arithmetic(precision: Precision, device: str) -> AbstractContextManager[object]:
    """The context of forward passes: mixed bfloat16 for bf16."""
    if precision == "bf16":
        return torch.autocast(torch.device(device).type, torch.bfloat16)
    return nullcontext()
