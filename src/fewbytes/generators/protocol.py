"""The interface of image generators."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from fewbytes.base.errors import UserError


@runtime_checkable
class ImageGenerator(Protocol):
    """A frozen generator: it samples valid latent vectors and synthesises images, with torch's global randomness."""

    latent_dim: int
    """H, the size of a latent vector."""

    def sample_latents(self, n: int) -> Tensor:
        """Valid latent vectors, float32 (n, H)."""

    def synthesise(self, latents: Tensor) -> Tensor:
        """The images of latent vectors (n, H): float32 (n, channels, height, width) in [0, 1], without gradients.

        The same latents give the same images. Raises UserError for latents of another size.
        """


@runtime_checkable
class ConditionalGenerator(ImageGenerator, Protocol):
    """A generator that was trained on classes and makes images of a requested class."""

    classes: int
    """The number of classes; 0: none."""

    def class_latents(self, labels: Tensor) -> Tensor:
        """Valid latent vectors of these classes (n,), float32 (n, H)."""


def check_latents(latents: Tensor, latent_dim: int) -> None:
    """Raises UserError for latents that are not (n, latent_dim)."""
    if latents.dim() != 2 or latents.shape[1] != latent_dim:
        raise UserError(f"this generator takes latents of shape (n, {latent_dim}), not {tuple(latents.shape)}")
