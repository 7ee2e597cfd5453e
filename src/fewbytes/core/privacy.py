"""Differential privacy: noise, accounting, and privacy of samples, which clients keep.

Dwork, Roth, "The Algorithmic Foundations of Differential Privacy", 2014; Abadi et al., "Deep Learning with Differential
Privacy", CCS 2016, with Poisson batches. The package dp-accounting does the accounting.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.state import State
from fewbytes.base.streams import seed_all, untouched
from fewbytes.core.promise import Privacy
from fewbytes.data.named import NamedTensors, one_tensor

T = TypeVar("T")
Samples = tuple[Tensor, Tensor]
"""A batch's samples and targets."""
Bytes = Callable[[int], bytes]
"""Returns the next `n` random bytes."""
ORDERS = (*range(2, 33), 36, 40, 48, 56, 64, 80, 96, 128, 192, 256, 512)
"""Orders of Renyi divergence, integers for speed; more orders would lower epsilon a little."""


def check_models(models: Iterable[nn.Module]) -> None:
    """Raises UserError for models that cannot be trained with noise."""
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                raise UserError(
                    f"dp takes no batch normalisation ({name}), which mixes samples and whose statistics get no "
                    "noise: use group normalisation, or a model without any, such as cnn4 or mlp"
                )


def accounting() -> Any:
    """The package dp-accounting. Raises UserError if it is missing."""
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError as error:
        raise UserError(f"dp is counted by dp-accounting: pip install 'fewbytes[dp]' ({error})") from None
    return dp_accounting


def random_bytes(key: bytes, *names: int | str | bytes) -> Bytes:
    """Random bytes that are unpredictable without the key, the same for the same names: SHAKE-256."""
    head = hashlib.sha256()
    for part in (key, *names):
        text = part if isinstance(part, bytes) else str(part).encode()
        head.update(len(text).to_bytes(8, "little") + text)
    block, prefix = itertools.count(), head.digest()
    return lambda length: hashlib.shake_256(prefix + next(block).to_bytes(8, "little")).digest(length)


def uniform(count: int, random: Bytes) -> Tensor:
    """`count` numbers above 0 and below 1, float64: odd multiples of 2^-53."""
    bits = torch.from_numpy(np.frombuffer(random(8 * count), "<i8").copy())
    return bits.bitwise_and((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)


def gaussian(count: int, random: Bytes) -> Tensor:
    """`count` numbers of the standard normal distribution, float64, by its inverse; at most 8.3 in magnitude."""
    normal: Tensor = torch.special.ndtri(uniform(count, random))
    return normal


def finite(value: Tensor, kind: torch.dtype) -> Tensor:
    """Finite float64 numbers in another type, clipped to its range."""
    most = torch.finfo(kind).max
    return value.clamp(-most, most).to(kind)


@dataclass(frozen=True)
class SamplePrivacy:
    """Privacy of each client's training samples, kept by the client, over a number of rounds with these terms."""

    privacy: Privacy
    rounds: int
    epochs: int
    batch: int
    steps: int = 0  # batches a round, in place of epochs; 0: use epochs

    @property
    def length(self) -> str:
        """A round's length, in words."""
        return f"{self.steps} steps" if self.steps else f"{self.epochs} epochs"

    def prepare(self, samples: Iterable[int]) -> None:
        """Prepare for clients with these numbers of samples, once before forking: load torch's per-sample gradients,
        which takes a second, and calibrate the noise."""
        model = nn.Linear(1, 1)
        clipped_sum(
            model, dict(model.named_parameters()), nn.functional.mse_loss, torch.ones(1, 1), torch.ones(1, 1), 1
        )
        for each in samples:
            self.multiplier(each)

    def sampled(self, samples: int) -> tuple[float, int]:
        """For a client with `samples`: the sampling rate of a batch, and the number of batches in a round."""
        return min(1.0, self.batch / samples), self.steps or self.epochs * math.ceil(samples / self.batch)

    def multiplier(self, samples: int) -> float:
        """z: the standard deviation of the noise on a batch's sum of gradients, in clips."""
        part, steps = self.sampled(samples)
        return calibrated(self.privacy.epsilon, self.privacy.delta, part, steps * self.rounds)

    def epsilon(self, samples: int, rounds: int) -> float:
        """The epsilon spent by `rounds` rounds of a client's participation."""
        return epsilon_of([self.spent(samples, rounds)], self.privacy.delta)

    def spent(self, samples: int, rounds: int) -> Steps:
        """The steps in `rounds` rounds."""
        part, steps = self.sampled(samples)
        return Steps(self.multiplier(samples), part, steps * rounds)


class Steps(NamedTuple):
    """A number of noisy sums of gradients: the noise in clips, and the sampling rate of a batch."""

    multiplier: float
    part: float
    steps: int


def epsilon_of(spent: Iterable[Steps], delta: float) -> float:
    """The epsilon that steps spend together, for adding or removing a sample, by Renyi divergence."""
    package = accounting()
    accountant, alike = package.rdp.RdpAccountant(ORDERS), Counter[tuple[float, float]]()
    for multiplier, part, steps in spent:
        alike[multiplier, part] += steps
    for (multiplier, part), steps in alike.items():
        if steps:
            accountant.compose(_steps(package, multiplier, part, steps))
    return float(accountant.get_epsilon(delta)) if alike.total() else 0.0


@functools.cache
def calibrated(epsilon: float, delta: float, part: float, steps: int) -> float:
    """The noise multiplier with which `steps` steps spend at most epsilon. Raises UserError if there is none."""
    package = accounting()
    try:
        z = package.calibrate_dp_mechanism(
            lambda: package.rdp.RdpAccountant(ORDERS), lambda z: _steps(package, z, part, steps), epsilon, delta,
            tol=1e-6,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"dp: no noise keeps epsilon {epsilon:g} over {steps} steps ({error})") from None
    return float(z)


def _steps(package: Any, multiplier: float, part: float, steps: int) -> Any:
    event = package.GaussianDpEvent(multiplier)
    return package.SelfComposedDpEvent(package.PoissonSampledDpEvent(part, event) if part < 1 else event, steps)


class Diary(Protocol):
    """A client's privacy records, beside its state: a run that returns to a checkpoint does not undo them."""

    def secret(self) -> bytes:
        """32 constant bytes known to nobody else."""

    def trained(self, client: int, begin: bytes, spent: Steps) -> int:
        """Record a training that starts from inputs with this 32-byte digest and spends `spent`; returns the client's
        number of different starts."""


class PrivateSteps:
    """Replaces batches and gradients in a client's local training: Poisson batches, clipped per-sample gradients, and
    noise on the sum, divided by the expected batch size."""

    def __init__(self, terms: SamplePrivacy, samples: int, random: Bytes) -> None:
        self.terms, self.samples, self.random = terms, samples, random
        self.part, _ = terms.sampled(samples)
        self.epoch = math.ceil(samples / terms.batch)  # batches
        self.multiplier = terms.multiplier(samples)

    def batches(self, device: torch.device) -> Iterator[Tensor]:
        """Endless batches of sample indices: each sample is in a batch at random, so batches may be empty."""
        while True:
            yield (uniform(self.samples, self.random) < self.part).nonzero()[:, 0].to(device)

    def one_by_one(
        self, rows: Tensor, read: Callable[[Tensor], tuple[Tensor | NamedTensors, Tensor]]
    ) -> tuple[Tensor | NamedTensors, Tensor]:
        """Samples and targets from `read` for rows (n,): each row alone, with a secret seed of its own, so that adding
        a sample does not change the others."""
        if not len(rows):
            return read(rows)
        with untouched():
            pieces = [read(row) for row in _seeded(rows.split(1), self.random)]
        return torch.cat([one_tensor(samples) for samples, _ in pieces]), torch.cat([targets for _, targets in pieces])

    def gradients(
        self, model: nn.Module, loss: Callable[[Any, Tensor], Tensor], samples: Tensor, targets: Tensor
    ) -> None:
        """Leaves a batch's noisy gradient in the parameters. Raises UserError for a model without per-sample
        gradients."""
        learnt = {name: p for name, p in model.named_parameters() if p.requires_grad}
        total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in learnt.items()}
        if len(targets):
            total = clipped_sum(model, learnt, loss, samples, targets, self.terms.privacy.clip, self.random)
        deviation = self.multiplier * self.terms.privacy.clip
        expected = self.part * self.samples
        for name, p in learnt.items():
            noise = deviation * gaussian(p.numel(), self.random).view(p.shape).to(p.device)
            p.grad = finite((total[name] + noise) / expected, p.dtype)


def clipped_sum(
    model: nn.Module,
    learnt: Mapping[str, Tensor],
    loss: Callable[[Any, Tensor], Tensor],
    samples: Tensor,
    targets: Tensor,
    norm: float,
    random: Bytes = os.urandom,
) -> State:
    """The sum of per-sample gradients of trained parameters, each clipped to a norm as one vector; float64.

    A sample with a non-finite gradient counts as zero: a model could be built to reveal a sample by a NaN, which no
    noise hides. Random draws of the model, as in dropout, use a seed from `random` for each sample. So one sample
    changes the sum by at most the norm, whatever the seeds. With draws for all samples at once, it would change the
    draws of all others.
    """

    def of_one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(functional_call(model, parameters, (x[None],)), y[None])

    values = {name: p.detach() for name, p in learnt.items()}

    def of_each(part: Samples, randomness: str) -> dict[str, Tensor]:
        each: dict[str, Tensor] = vmap(grad(of_one), in_dims=(None, 0, 0), randomness=randomness)(values, *part)
        return each

    with untouched():
        try:
            [each] = [of_each(part, "error") for part in _seeded([(samples, targets)], random)]
        except RuntimeError:  # the model draws, or has no per-sample gradients
            parts = zip(samples.split(1), targets.split(1), strict=True)
            try:
                pieces = [of_each(part, "different") for part in _seeded(parts, random)]
            except RuntimeError as error:
                why = one_line(error, 200)
                raise UserError(f"dp of samples: this model has no gradient of each sample: {why}") from None
            each = {name: torch.cat([piece[name] for piece in pieces]) for name in values}
    doubled = {name: value.double() for name, value in each.items()}
    squares = torch.as_tensor(sum(value.flatten(1).square().sum(1) for value in doubled.values()))
    scale = (norm / squares.sqrt().clamp(min=1e-300)).clamp(max=1)
    counted = squares.isfinite()
    return {name: torch.tensordot(scale[counted], value[counted], 1) for name, value in doubled.items()}


def _seeded(parts: Iterable[T], random: Bytes) -> Iterator[T]:
    """Yield each part after seeding all global generators for it."""
    for part in parts:
        seed_all(int.from_bytes(random(8), "little"))
        yield part
