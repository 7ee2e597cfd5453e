"""Settings of what is done to finished runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fewbytes.base.ranges import Count, NotNegative, Positive, Several, Whole
from fewbytes.base.settings import Group, setting


@dataclass(frozen=True)
class Probing(Group):
    """How probes are trained; the paper's values. Raises UserError for values that cannot be."""

    title: ClassVar[str] = "Probes"

    epochs: Count = setting(160, "Epochs of decoders and auxiliary networks; lr falls along a cosine.")
    linear_epochs: Count = setting(10, "Epochs of the linear layers; lr stays.")
    samples: Several | None = setting(None, "Train probes on at most so many samples (default: all).")
    batch: Several = setting(128, "Samples of a batch.")
    lr: Positive = setting(0.01, "Learning rate.")
    seed: int = setting(0, "Same seed, same figures.")


@dataclass(frozen=True)
class Attacking(Group):
    """How images are attacked. Raises UserError for values that cannot be."""

    title: ClassVar[str] = "Attack"

    images: Count = setting(20, "Number of images, each attacked alone.")
    iterations: Count = setting(300, "Iterations of L-BFGS at most, 20 steps each.")
    restarts: Whole = setting(1, "Further starts where the gradients of one do not match.")
    noise: NotNegative = setting(0.0, "Variance of Gaussian noise on every gradient entry that is observed.")
    seed: int = setting(0, "Same seed, same figures.")
