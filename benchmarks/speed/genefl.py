"""What GENE-FL adds to a client's local training: the Fisher information of its samples and the scores of its layers.

    python benchmarks/speed/genefl.py [mlp] [resnet8] [resnet18]

One thread, its processor time: ten local epochs in batches of 64 and what is added, in turn, the median of several.
MLP on digits, ResNets on CIFAR-10 if FEWBYTES_DATA has it, else on random pixels. The goal is 0.15; it takes a minute.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from fewbytes.data import load_dataset
from fewbytes.fisher import fisher_diagonal
from fewbytes.models import build_model
from fewbytes.training import fit, prepared, ready

CASES = {"mlp": (128, 50), "resnet8": (128, 3), "resnet18": (64, 3)}  # samples of the client, repeats
EPOCHS = 10


def client_data(model: str, samples: int) -> tuple[Tensor, Tensor]:
    """The first training samples, float32 in 0..1, and their labels."""
    if model == "mlp" or os.path.isdir(os.path.join(os.environ.get("FEWBYTES_DATA", ""), "cifar10")):
        x, y = load_dataset("digits" if model == "mlp" else "cifar10").train.take(range(samples)).load()
    else:
        x, y = torch.rand(samples, 3, 32, 32), torch.randint(10, (samples,))
    return ready(x), y


def added(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """What the method does on a client besides training."""
    fisher_diagonal(model, x, y)


def seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(CASES), metavar="model", help=", ".join(CASES))
    names = parser.parse_args().models
    torch.set_num_threads(1)
    for name in names:
        torch.manual_seed(0)
        samples, repeats = CASES[name]
        x, y = client_data(name, samples)
        model = prepared(build_model(name, tuple(x.shape[1:]), 10))
        train = partial(fit, model, x, y, epochs=EPOCHS, lr=0.01, batch=64, momentum=0.9)
        score = partial(added, model, x, y)
        score()  # the first call is slower
        times = [(seconds(train), seconds(score)) for _ in range(repeats)]
        local, extra = (median(column) for column in zip(*times, strict=True))
        print(f"{name}, {samples} samples: training {local:.4f} s, added {extra:.4f} s, {extra / local:.3f} of it")


if __name__ == "__main__":
    main()
