"""What an image generator is to a method, and where one comes from: a name, a file or a folder."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from fewbytes.errors import UserError

COMPACT = Path(__file__).with_name("compact.safetensors")


@runtime_checkable
class ImageGenerator(Protocol):
    """A frozen generator: a sampler of valid latent vectors, and their synthesis. Randomness is torch's global one."""

    latent_dim: int
    """H, the size of a latent vector."""

    def sample_latents(self, n: int) -> Tensor:
        """Valid latent vectors, float32 (n, H)."""

    def synthesise(self, latents: Tensor) -> Tensor:
        """The images of latent vectors (n, H): float32 (n, channels, height, width) in [0, 1], without gradients.

        The same latents give the same images. Raises UserError for latents of another size.
        """


@cache
def load_generator(name: str) -> ImageGenerator:
    """A generator, loaded once a process. `name` is

    - `compact`: the small one that comes with the package, of 32 x 32 colour images of plain objects
    - a .safetensors file that `scripts/train_generator.py` wrote
    - `package.module:callable`, your own: what it returns when called with nothing

    Raises UserError for anything that is not a generator, before any of it is run.
    """
    path = COMPACT if name == "compact" else Path(name)
    if path.suffix == ".safetensors":
        from fewbytes.generators.compact import CompactGenerator

        return CompactGenerator(path)
    if path.exists():
        raise UserError(f"{name} is no generator that is known here")
    module, _, attribute = name.partition(":")
    if not attribute:
        raise UserError(f"there is no generator {name!r}: it is neither a file or folder nor package.module:callable")
    return _own(module, attribute)


def _own(module: str, attribute: str) -> ImageGenerator:
    name = f"{module}:{attribute}"
    try:
        generator = getattr(importlib.import_module(module), attribute)()
    except Exception as error:  # importing and calling run the user's code
        text = " ".join(str(error).split())
        raise UserError(f"the generator {name!r} cannot be made: {type(error).__name__}: {text}") from error
    if not isinstance(generator, ImageGenerator):
        raise UserError(
            f"{name!r} made a {type(generator).__name__}; a generator has latent_dim, sample_latents, synthesise"
        )
    return generator


def check_latents(latents: Tensor, latent_dim: int) -> None:
    """Raises UserError for latents that are not (n, latent_dim)."""
    if latents.dim() != 2 or latents.shape[1] != latent_dim:
        raise UserError(f"this generator takes latents of shape (n, {latent_dim}), not {tuple(latents.shape)}")
