"""Privacy of clients, kept by the server: a mean of clipped updates, with noise.

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
    """The privacy of clients that the server keeps, over a number of rounds with one noisy mean each.

    Each client counts as a participant of all rounds: sampling follows from the public seed, so it gives no
    amplification, and knowing the sampled clients does no harm. Several Gaussian mechanisms are equivalent to one,
    whose epsilon is exact: Balle, Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018.
    """

    privacy: Privacy
    rounds: int
    seed: int

    @functools.cached_property
    def multiplier(self) -> float:
        """z: the deviation of the noise on the sum of updates, in clips. Raises UserError without
        dp-accounting."""
        p = self.privacy
        with np.errstate(divide="ignore"):  # the search divides by zero
            z = float(accounting().get_sigma_gaussian(p.epsilon, p.delta)) * math.sqrt(self.rounds)
        while gaussian_epsilon(z, self.rounds, p.delta) > p.epsilon:  # the search's tolerance may exceed epsilon
            z *= 1 + 1e-9
        return z

    def epsilon(self, means: int) -> float:
        """The epsilon spent by this number of noisy means."""
        return gaussian_epsilon(self.multiplier, means, self.privacy.delta)

    def random(self, t: int) -> Bytes:
        """Noise source of round t: from a key that is drawn now and forgotten or, for studies, from the run's seed."""
        key = os.urandom(32) if self.privacy.noise == "secure" else str(self.seed).encode()
        return random_bytes(key, "server", t, "noise")


def gaussian_epsilon(multiplier: float, times: int, delta: float) -> float:
    """The epsilon spent by `times` Gaussian mechanisms together."""
    if not times:
        return 0.0
    with np.errstate(divide="ignore"):
        return float(accounting().get_epsilon_gaussian(multiplier / math.sqrt(times), delta))


class PrivateMean:
    """Replaces `Mean` and `EntryMeans` under client privacy: all clients weigh the same, updates are clipped, and the
    mean gets noise.

    `around`: the clients' message, from which updates count; entries missing there count from 0. `release`: called for
    each mean, returns the number of clients asked, which divides the sum, and the source of noise. A client without
    reply counts as a zero update: one client's reply changes the sum by a norm of at most the clip. Counters stay as
    sent. Sums are in float64.
    """

    def __init__(
        self, central: ClientPrivacy, around: Mapping[str, Tensor] | None, release: Callable[[], tuple[int, Bytes]]
    ) -> None:
        self.central, self.around, self._release = central, around or {}, release
        self.weights: dict[str, float] = {}
        self._sum: State = {}
        self._like: State = {}

    def add(self, state: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one client's state; its weight is ignored, as it is private. Raises MethodError for differing entries."""
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
        """The noisy mean. Raises MethodError if nobody replied, or this round already had one."""
        if not self._like:
            raise MethodError("nothing to average: no client replied")
        asked, random = self._release()
        deviation = self.central.multiplier * self.central.privacy.clip
        mean: State = {}
        for name, like in self._like.items():
            start = self.around.get(name)
            if not like.is_floating_point():
                if start is None:
                    raise MethodError(f"the counter {name!r} cannot be noised: do not send it")
                mean[name] = start.clone()
                continue
            total = self._sum[name] + deviation * gaussian(like.numel(), random).view(like.shape)
            mean[name] = finite((0 if start is None else start.double()) + total / asked, like.dtype)
        return mean

    def over(self, old: State) -> State:
        """`old` with its entries replaced by the noisy mean; entries that nobody sent stay."""
        if unknown := self.weights.keys() - old.keys():
            raise MethodError(f"a client sent entries the server does not share: {', '.join(sorted(unknown)[:3])}")
        return old | self() if self._like else dict(old)


def clipped(change: State, norm: float) -> State:
    """The change, float64, times min(1, norm / its own norm), all entries as one vector; zeros if it is not finite,
    which no noise would hide."""
    length = math.sqrt(sum(float(value.square().sum()) for value in change.values()))
    if not math.isfinite(length):
        return {name: torch.zeros_like(value) for name, value in change.items()}
    return {name: value * (norm / length) for name, value in change.items()} if length > norm else change
