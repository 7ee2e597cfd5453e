"""Simulated differences between clients: label noise in training, and feature shift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from fewbytes.base.errors import UserError
from fewbytes.base.streams import stream
from fewbytes.data.clients import FederatedData
from fewbytes.data.named import NamedTensors
from fewbytes.data.settings import Shift
from fewbytes.data.split import ClientData, Items, Split, Targets
from fewbytes.data.transforms import turned

CHUNK = 1024  # images rotated at a time


def with_label_noise(data: FederatedData, rates: Sequence[float], seed: int) -> FederatedData:
    """`data` with symmetric label noise: of client i's training labels, a random share `rates[i]` is replaced by other
    classes, all equally likely. Rates are repeated over the clients; test labels stay as they are.

    A client's noise depends only on the seed, its number and its samples. Raises UserError for other targets than
    classes, and for more rates than clients.
    """
    classes = len(data.classes)
    if data.learns != "classes" or classes < 2:
        raise UserError(f"label_noise needs at least two classes, and the targets here are {data.learns}: leave it out")
    if len(rates) > len(data.clients):
        raise UserError(f"label_noise gives {len(rates)} rates for {len(data.clients)} clients: give at most one each")

    def noisy(i: int, client: ClientData) -> ClientData:
        rate, train = rates[i % len(rates)], client.train
        if not rate or not len(train):
            return client
        rng = stream(seed, "label noise", "client", i)
        rows = np.arange(len(train.y)) if train.rows is None else train.rows
        wrong = rows[rng.permutation(len(rows))[: round(rate * len(rows))]]
        y = train.y.clone()
        y[wrong] = (y[wrong] + torch.from_numpy(rng.integers(1, classes, len(wrong)))) % classes
        return replace(client, train=Split(train.x, y, train.rows, train.transform))

    return replace(data, clients=tuple(noisy(i, client) for i, client in enumerate(data.clients)))


def with_shift(data: FederatedData, shift: Shift, seed: int) -> FederatedData:
    """`data` with shifted samples: client i of n has i / (n - 1) of the shift, in training and in its own test samples.
    The server's test set stays as it is. Shifted samples are kept in memory.

    The shift depends only on the arguments. Raises UserError for samples that it does not fit.
    """
    last = max(1, len(data.clients) - 1)

    def shifted(i: int, client: ClientData) -> ClientData:
        level = shift.level * (i / last if len(data.clients) > 1 else 1)
        if not level:
            return client
        halves = (("train", client.train), ("test", client.test))
        return ClientData(*(_shifted(half, shift.kind, level, stream(seed, "shift", i, name)) for name, half in halves))

    return replace(data, clients=tuple(shifted(i, client) for i, client in enumerate(data.clients)))


def _shifted(split: Split, kind: str, level: float, rng: Generator) -> Split:
    x, learnt = _samples(split), split.learnt
    if not len(x):
        return split
    bytes_ = x.dtype == torch.uint8
    if not (x.is_floating_point() or (bytes_ and x.dim() > 2)):
        raise UserError("shift is for images and for numbers, and samples here are integers: leave it out")
    if kind == "rotation":
        if x.dim() != 4 or split.learns in ("boxes", "masks"):
            raise UserError(
                f"shift by rotation needs images without boxes or masks, samples have shape {tuple(x.shape[1:])}: use "
                "noise"
            )
        angle = torch.full((CHUNK,), level)
        x = torch.cat([turned(part.float(), angle[: len(part)]).to(x.dtype) for part in x.split(CHUNK)])
    else:
        drawn = torch.from_numpy(rng.standard_normal(tuple(x.shape), dtype=np.float32)) * level
        x = (x + 255 * drawn).round_().clamp_(0, 255).to(torch.uint8) if bytes_ else x + drawn
    if learnt is not None:
        learnt = Targets(learnt.kind, split.targets, learnt.truth)
    return Split(x, split.labels, None, split.transform, learnt)


def _samples(split: Split) -> Tensor:
    """A copy of a split's samples, in their own type. Raises UserError for several tensors."""
    if isinstance(split.x, NamedTensors):
        raise UserError(f"shift needs one tensor of samples, not {', '.join(split.x.tensors)}: leave it out")
    rows = np.arange(len(split)) if split.rows is None else split.rows
    if isinstance(split.x, Items):
        return split.x[rows]
    return split.x[torch.from_numpy(rows)] if isinstance(split.x, Tensor) else torch.from_numpy(split.x[rows])
