"""What generating kernels costs: forward and backward of a network with 16 base kernels beside the ordinary one.

    python benchmarks/speed/kgf.py [resnet18] [resnet10:width=32] [--batch 64] [--repeats 7]

One thread, its processor time, the two in turn, the least of several; images of 32x32. Then the peak memory of one
training step of each, in a process of its own, above what it held before the model was made. The goal for ResNet-18 at
batch 64 is a ratio of at most 1.08, and no more memory than the ordinary network's plus one layer's generated kernels.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from fewbytes.core.training import Local, fit, prepared, ready
from fewbytes.engines.workers import keep_memory
from fewbytes.models import build_model
from fewbytes.models.kgf import GeneratedConv2d, Kernels, with_generated_kernels


def made(name: str, base: int) -> nn.Module:
    """The model, with generated kernels if base is not 0."""
    torch.manual_seed(0)
    model = build_model(name, (3, 32, 32), 10)
    return prepared(with_generated_kernels(model, Kernels(base)) if base else model)


def seconds(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Processor time of one forward and backward pass."""
    for p in model.parameters():
        p.grad = None
    started = time.process_time()
    F.cross_entropy(model(x), y).backward()
    return time.process_time() - started


def peak(name: str, base: int, batch: int) -> None:
    """Print the megabytes that three SGD steps with momentum take at most."""
    x, y = ready(torch.randn(3 * batch, 3, 32, 32)), torch.randint(10, (3 * batch,))
    fit(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(7200, 10)), x, y, Local(epochs=1, lr=0.1, batch=batch)
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = held()
    fit(made(name, base), x, y, Local(epochs=1, lr=0.01, batch=batch, momentum=0.9))
    print(held() - before)


def held() -> float:
    """The most memory that this process has held, MB; Linux."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def memory(name: str, base: int, batch: int) -> float:
    """`peak` in a process of its own."""
    command = [sys.executable, __file__, name, "--batch", str(batch), "--peak", str(base)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["resnet18", "resnet10:width=32"], metavar="model")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()  # as workers do
    if options.peak is not None:
        peak(options.models[0], options.peak, options.batch)
        return
    for name in options.models:
        x, y = ready(torch.randn(options.batch, 3, 32, 32)), torch.randint(10, (options.batch,))
        passes = [partial(seconds, made(name, base), x, y) for base in (0, 16)]
        times = [[one() for one in passes] for _ in range(options.repeats + 1)][1:]
        plain, generated = (min(column) for column in zip(*times, strict=True))
        layers = [m for m in made(name, 16).modules() if isinstance(m, GeneratedConv2d)]
        largest = max(m.alpha.nbytes for m in layers) / 1e6
        most = [memory(name, base, options.batch) for base in (0, 16)]
        print(
            f"{name}, batch {options.batch}: {generated:.3f} s against {plain:.3f} s, {generated / plain:.3f}; "
            f"peak {most[1]:.0f} MB against {most[0]:.0f} MB (one layer's generated kernels: {largest:.1f} MB)",
            flush=True,
        )


if __name__ == "__main__":
    main()
