"""The promise to clients, which the server keeps: a mean of clipped updates, under noise.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, with equal
weights.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fewbytes.base.errors import MethodError
from fewbytes.base.state import State
from fewbytes.core.privacy import Bytes, accounting, finite, gaussian, random_bytes
from fewbytes.core.promise import Privacy


@dataclass(frozen=True)
class ClientPrivacy:
    """The promise to clients that the server keeps, over so many rounds of one noisy mean each.

    A client counts as if it took part in all rounds, as who does follows from the seed, which everybody knows: nothing
    is gained by sampling, and nothing is lost if a cohort is known. Gaussian mechanisms together are one, whose epsilon
    is exact: Balle, Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018.
    """

    privacy: Privacy
    rounds: int
    seed: int

    @functools.cached_property
    def multiplier(self) -> float:
        """z: the deviation of the noise on the sum of updates, in clips. Raises UserError without dp-accounting."""
        p = self.privacy
        with np.errstate(divide="ignore"):  # it tries deviations out
            z = float(accounting().get_sigma_gaussian(p.epsilon, p.delta)) * math.sqrt(self.rounds)
        while gaussian_epsilon(z, self.rounds, p.delta) > p.epsilon:  # by what the search stops at
            z *= 1 + 1e-9
        return z

    def epsilon(self, means: int) -> float:
        """What so many noisy means have spent."""
        return gaussian_epsilon(self.multiplier, means, self.privacy.delta)

    def random(self, t: int) -> Bytes:
        """For the noise of round t: of a key that is drawn now and forgotten, or, to study, of the run's seed."""
        key = os.urandom(32) if self.privacy.noise == "secure" else str(self.seed).encode()
        return random_bytes(key, "server", t, "noise")


def gaussian_epsilon(multiplier: float, times: int, delta: float) -> float:
    """What so many Gaussian mechanisms spend together."""
    if not times:
        return 0.0
    with np.errstate(divide="ignore"):
        return float(accounting().get_epsilon_gaussian(multiplier / math.sqrt(times), delta))


class PrivateMean:
    """What stands in for `Mean` and `EntryMeans` where clients are promised privacy: all clients weigh the same, each
    one's update is clipped, and noise is put on the mean.

    `around`: what clients were sent, from which updates count; an entry that it lacks counts from 0. `release`: called
    when the mean is asked for, gives how many clients were asked, by which the sum is divided, and what to draw from.
    Who does not reply counts as no update: with a client's reply or without it, the sum differs by a norm of at most
    the clip. Counters stay as they were sent. Sums are in float64.
    """

    def __init__(
        self, central: ClientPrivacy, around: Mapping[str, Tensor] | None, release: Callable[[], tuple[int, Bytes]]
    ) -> None:
        self.central, self.around, self._release = central, around or {}, release
        self.weights: dict[str, float] = {}
        self._sum: State = {}
        self._like: State = {}

    def add(self, state: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one client's state; its weight is its own secret. Raises MethodError for entries unlike the others'."""
        if self._like and (
            self._like.keys() != state.keys() or any(self._like[n].shape != v.shape for n, v in state.items())
        ):
            raise MethodError("a mean under noise needs the same entries in every state")
        self._like = self._like or dict(state)
        change = {
            name: value.double() - self.around.get(name, 0)
            for name, value in state.items()
            if value.is_floating_point()
        }
        for name, value in clipped(change, self.central.privacy.clip).items():
            self._sum[name] = self._sum[name] + value if name in self._sum else value
        self.weights = {name: self.weights.get(name, 0.0) + 1 for name in state}

    def __call__(self) -> State:
        """The noisy mean. Raises MethodError if nobody replied, or there was one in this round already."""
        if not self._like:
            raise MethodError("a mean of nothing: no client replied")
        asked, random = self._release()
        deviation = self.central.multiplier * self.central.privacy.clip
        mean: State = {}
        for name, like in self._like.items():
            start = self.around.get(name)
            if not like.is_floating_point():
                if start is None:
                    raise MethodError(f"the counter {name!r} bears no noise: do not send it")
                mean[name] = start.clone()
                continue
            total = self._sum[name] + deviation * gaussian(like.numel(), random).view(like.shape)
            mean[name] = finite((0 if start is None else start.double()) + total / asked, like.dtype)
        return mean

    def over(self, old: State) -> State:
        """The same in place of `old`'s entries; those nobody sent stay."""
        if unknown := self.weights.keys() - old.keys():
            raise MethodError(f"a client sent entries the server does not share: {', '.join(sorted(unknown)[:3])}")
        return old | self() if self._like else dict(old)


def clipped(change: State, norm: float) -> State:
    """The change, float64, times min(1, norm / its own norm), all entries as one vector; nothing of one that is not
    finite, which no noise would hide."""
    length = math.sqrt(sum(float(value.square().sum()) for value in change.values()))
    if not math.isfinite(length):
        return {name: torch.zeros_like(value) for name, value in change.items()}
    return {name: value * (norm / length) for name, value in change.items()} if length > norm else change
