"""Fed-KGF's Tables 1 and 4: traffic of a round from parameter counts, and what really crosses the wire.

    python benchmarks/paper/fedkgf_tables.py [--no-runs]

The paper's MB are 2^20 bytes of float32. Ten clients; ResNet-18 for 32x32 colour images and 10 classes, YOLOX-S for 80
categories (needs the extra `detection`). "Sent" is the ledger of one round of FedAvg and Fed-KGF on a few random
images, lossless coding included, in 10^6 bytes.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import fewbytes as fb
from fewbytes.methods.fedkgf import modules_of
from fewbytes.models import build_model
from fewbytes.models.kgf import Kernels, with_generated_kernels

MIB, CLIENTS = 2**20, 10


def counted(model: nn.Module, without: str = "-") -> tuple[int, int]:
    """Parameters and buffers of the model, but for entries whose name contains `without`."""
    learnt = {name for name, _ in model.named_parameters()}
    sizes = {name: value.numel() for name, value in model.state_dict().items() if without not in name}
    return sum(n for name, n in sizes.items() if name in learnt), sum(n for k, n in sizes.items() if k not in learnt)


def table(name: str, printed: tuple[float, float, float], shape: tuple[int, ...], classes: int, without: str) -> None:
    """One table: the full model, base kernels without and with module upload, ours beside theirs."""
    full, buffers = counted(build_model(name, shape, classes), without)
    small = with_generated_kernels(build_model(name, shape, classes), Kernels(16))
    learnt, _ = counted(small, without)
    modules = [names for names in modules_of(small) if any(without not in entry for entry in names)]
    print(f"{name}{f' without {without}s' if without != '-' else ''}: {len(modules)} modules, {full:,} parameters, "
          f"{learnt:,} with base kernels ({learnt / full:.6f}), {buffers:,} buffer entries")  # fmt: skip
    rows = (("full, as FedAvg", full, CLIENTS), ("base kernels, all clients upload", learnt, CLIENTS),
            ("base kernels, module upload", learnt, 1))  # fmt: skip
    for (what, count, copies), theirs in zip(rows, printed, strict=True):
        ours = [4 * copies * n / MIB for n in (count, count + buffers)]
        print(f"  {what}: {ours[0]:.2f} MiB, with buffers {ours[1]:.2f}; paper {theirs:.2f}, "
              f"of its first row {theirs / printed[0]:.6f}, ours {count * copies / (full * CLIENTS):.6f}")  # fmt: skip


def sent(method: fb.Method, name: str) -> None:
    """The bytes of one round, from a real run."""
    images, labels = torch.rand(CLIENTS, 4, 3, 32, 32), torch.arange(4)
    task = fb.Task.of(lambda: build_model(name, (3, 32, 32), 10), [((x, labels), (x, labels)) for x in images])
    totals = fb.run(method, task, rounds=1, save_models=False).ledger.totals()
    print(f"  {type(method).__name__}: {totals['uplink_bytes'] / 1e6:.2f} MB up, "
          f"{totals['downlink_bytes'] / 1e6:.2f} MB down ({totals['uplink_nominal_bytes'] / 1e6:.2f} and "
          f"{totals['downlink_nominal_bytes'] / 1e6:.2f} before lossless coding)")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-runs", action="store_true", help="counts only")
    runs = not parser.parse_args().no_runs
    print("Table 1")
    for without in ("shortcut", "-"):
        table("resnet18", (289.31, 13.20, 8.46), (3, 32, 32), 10, without)
    if runs:
        print("sent in a round, ResNet-18:")
        for method in (fb.FedAvg(), fb.FedKGF(owners=0), fb.FedKGF()):
            sent(method, "resnet18")
    print("Table 4")
    table("yolox-s", (342.99, 30.14, 21.69), (3, 64, 64), 80, "-")


if __name__ == "__main__":
    main()
