"""What GENE-FL adds to a client's local training: the Fisher information of its samples and the scores of its layers.

    python benchmarks/speed/genefl.py [mlp] [resnet8] [resnet18]

One thread, its processor time: ten local epochs in batches of 64, with and without the pulls to the cluster's model,
and what is added, in turn, the median of several. MLP on digits, ResNets on CIFAR-10 if FEWBYTES_DATA has it, else on
random pixels. The goal is at most 0.15 of a client's local time; it takes two minutes.
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

from fewbytes.base.state import State, state_of
from fewbytes.core.training import fit, prepared, ready
from fewbytes.data import load_dataset
from fewbytes.methods.genefl import layer_scores, normalised, pulls
from fewbytes.models import build_model
from fewbytes.models.fisher import fisher_diagonal
from fewbytes.models.layers import layers_of

CASES = {"mlp": (128, 50), "resnet8": (128, 3), "resnet18": (64, 3)}  # samples of the client, repeats
EPOCHS = 10


def client_data(model: str, samples: int) -> tuple[Tensor, Tensor]:
    """The first training samples, float32 in 0..1, and their labels."""
    if model == "mlp" or os.path.isdir(os.path.join(os.environ.get("FEWBYTES_DATA", ""), "cifar10")):
        x, y = load_dataset("digits" if model == "mlp" else "cifar10").train.take(range(samples)).load()
    else:
        x, y = torch.rand(samples, 3, 32, 32), torch.randint(10, (samples,))
    return ready(x), y


def added(model: nn.Module, x: Tensor, y: Tensor, before: State) -> None:
    """What the method does on a client besides its steps: the mask of low information, the scores after training."""
    information = normalised(fisher_diagonal(model, x, y))
    for value in information.values():
        value.le(0.5)
    layer_scores(before, before, layers_of(model))


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
        entries = [entry for own in layers_of(model).values() for entry in own]
        theta: State = {name: model.get_parameter(name) for name in entries}
        centre = {name: p.detach().clone() for name, p in theta.items()}
        gen, elg = pulls(theta, centre, {name: torch.ones_like(p) for name, p in centre.items()})
        plain = partial(fit, model, x, y, epochs=EPOCHS, lr=0.01, batch=64, momentum=0.9)
        train = partial(plain, extra=lambda _, gen=gen, elg=elg: 0.5 * gen() + 0.05 * elg())
        score = partial(added, model, x, y, state_of(model))
        score()  # the first call is slower
        times = [(seconds(train), seconds(plain), seconds(score)) for _ in range(repeats)]
        own, sgd, extra = (median(column) for column in zip(*times, strict=True))
        print(
            f"{name}, {samples} samples: added {extra:.4f} s to {own:.4f} s of local training, {extra / own:.3f} of it "
            f"({extra / sgd:.3f} of the {sgd:.4f} s without the pulls)", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
