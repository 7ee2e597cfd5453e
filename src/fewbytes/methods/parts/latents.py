"""Keeps latent vectors, and the transformer, in the range that an image generator can use (FedKTL's server)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.data.public import with_channels
from fewbytes.methods.parts.heterogeneous import class_means


def use_statistics_of(transformer: nn.Sequential, prototypes: Tensor) -> None:
    """Give F's batch normalisation the statistics of these prototypes (n, K); a single prototype changes nothing.

    Statistics of the last round fit the current prototypes badly: in eval mode, F would map them far out.
    """
    if len(prototypes) > 1:
        statistics = transformer[1].state_dict(keep_vars=True)
        with torch.no_grad():
            values: Tensor = transformer[0](prototypes)
            statistics["running_mean"].copy_(values.mean(0))
            statistics["running_var"].copy_(values.var(0, correction=0))


def shortened(vectors: Tensor, length: float) -> Tensor:
    """Vectors (n, H) clipped to norm `length`: Eq. 3 has no gradient at distant points."""
    scale: Tensor = length / vectors.norm(dim=1, keepdim=True).clamp(min=length)
    return vectors * scale


def with_class_means(centroids: Tensor, transformer: nn.Module, prototypes: Tensor, labels: Tensor) -> Tensor:
    """The centroids (C, H), updated with the mean of F(P), in eval mode, for every class in `labels`."""
    with torch.no_grad():
        means = class_means(transformer.eval()(prototypes), labels)
    centroids = centroids.clone()
    centroids[means.classes] = means.rows
    return centroids


def usable_classes(centroids: Tensor, known: list[int], valid: Tensor) -> list[int]:
    """The known classes whose centroids are at most twice as long as the longest of some valid latents (n, H).

    Longer ones give uninformative images, and the vectors would harm the clients' training.
    """
    longest = 2 * valid.norm(dim=1).max()
    return [c for c in known if centroids[c].norm() <= longest]


def client_images(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Generated images (n, any channels, height, width) in the clients' `shape`: resized to cover, centre-cropped."""
    channels, height, width = shape
    factor = max(height / images.shape[2], width / images.shape[3])
    size = [max(goal, round(n * factor)) for n, goal in zip(images.shape[2:], (height, width), strict=True)]
    if tuple(size) != tuple(images.shape[2:]):
        images = F.interpolate(images, size, mode="bilinear", antialias=True)
    top, left = (round((n - goal) / 2) for n, goal in zip(images.shape[2:], (height, width), strict=True))
    return with_channels(images[:, :, top : top + height, left : left + width], channels)
