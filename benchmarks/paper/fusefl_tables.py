"""FuseFL's Tables 4 (memory) and 13 (communication) from the code's own counts, and what really has to travel.

    python benchmarks/paper/fusefl_tables.py

Table 4's rule: four bytes a parameter, MB = 2^20 bytes, M branches and M adaptors per fused block, one classifier;
single model and ensemble with their buffers. Table 13's: M times Table 4 for FuseFL (every client downloads the whole
fused model), M single models for one-shot methods, 10 M for FedAvg. ResNet-18 on 32x32 colour images, 10 classes.
"""

from __future__ import annotations

import torch
from torch import nn

from fewbytes.models.blocks import classifier_of, cut
from fewbytes.models.fused import make_adaptor
from fewbytes.models.resnet import ResNet
from fewbytes.reproduce.fusefl import TABLE_4, WIDTHS
from fewbytes.reproduce.grid import printed

MIB, IMAGE, CLASSES = 2**20, (3, 32, 32), 10


def size(module: nn.Module | None, buffers: bool = False) -> int:
    """Parameters of a module; with its buffers, if asked for."""
    if module is None:
        return 0
    held = list(module.parameters()) + (list(module.buffers()) if buffers else [])
    return sum(value.numel() for value in held)


def counts(width: int, clients: int, blocks: int, kind: str) -> tuple[list[int], list[int], list[int], nn.Linear]:
    """Parameters and buffer entries of each block, parameters of each adaptor, and the classifier of one client."""
    with torch.device("meta"):
        model = ResNet(18, IMAGE[0], CLASSES, width).eval()
        parts, takes, x = cut(model, blocks), [], torch.zeros(1, *IMAGE)
        for part in parts:
            takes.append(tuple(x.shape[1:]))
            x = part.eval()(x)
        adaptors = [0] + [size(make_adaptor(kind, (clients * t[0], *t[1:]), t)) for t in takes[1:]]
    learnt = [size(part) for part in parts]
    return learnt, [size(part, True) - n for part, n in zip(parts, learnt, strict=True)], adaptors, classifier_of(model)


def fused(clients: int, blocks: int, kind: str = "conv") -> int:
    """Parameters of the whole fused network."""
    learnt, _, adaptors, classifier = counts(WIDTHS[clients], clients, blocks, kind)
    return clients * (sum(learnt) + sum(adaptors)) + size(classifier)


def main() -> None:
    with torch.device("meta"):
        single = size(ResNet(18, IMAGE[0], CLASSES, 64), True)
    ours = {
        "single": [single for _ in WIDTHS],
        "Ensemble": [m * single for m in WIDTHS],
        **{f"FuseFL K={k}": [fused(m, k) for m in WIDTHS] for k in (2, 4, 8)},
        "FuseFL K=4, average": [fused(m, 4, "average") for m in WIDTHS],
    }
    print("Table 4, memory in MiB: ours (printed)\n\n| | " + " | ".join(f"M = {m}" for m in WIDTHS) + " |")
    print("| --- |" + " --- |" * len(WIDTHS))
    for name, row in ours.items():
        pairs = zip(row, printed(TABLE_4[name]), strict=True)
        print(f"| {name} | " + " | ".join(f"{4 * n / MIB:.2f} ({theirs.mean:.2f})" for n, theirs in pairs) + " |")
    print(
        "\nTable 13, communication in MiB by the paper's rule\n\n| | " + " | ".join(f"M = {m}" for m in WIDTHS) + " |"
    )
    print("| --- |" + " --- |" * len(WIDTHS))
    rows = {"FedAvg, 10 rounds": [10 * m * single for m in WIDTHS], "one-shot": [m * single for m in WIDTHS]}
    rows |= {name: [m * n for m, n in zip(WIDTHS, row, strict=True)] for name, row in ours.items() if "Fuse" in name}
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(f"{4 * n / MIB:.2f}" for n in row) + " |")
    print("\nWhat travels, per client over the whole run, MB = 10^6 bytes, uncoded (with buffers; statistics if every")
    print("client holds every class)\n\n| | up | of it statistics | down |\n| --- | --- | --- | --- |")
    for m in WIDTHS:
        for k in (2, 4, 8):
            learnt, kept, adaptors, classifier = counts(WIDTHS[m], m, k, "conv")
            entries = sum(learnt) + sum(kept) + sum(adaptors)  # a batch counter takes 8 bytes, as two entries
            entries += sum(1 for name, _ in ResNet(18, 3, 10, 1).named_buffers() if name.endswith("tracked"))
            features = classifier.in_features
            statistics = 4 * CLASSES * (features + features * (features + 1) // 2) + 8 * CLASSES
            up = 4 * (entries + size(classifier)) + statistics
            down = 4 * ((m - 1) * entries + size(classifier))
            print(
                f"| M = {m}, width {WIDTHS[m]}, K = {k} | {up / 1e6:.2f} | {statistics / 1e6:.2f} | {down / 1e6:.2f} |"
            )


if __name__ == "__main__":
    main()
