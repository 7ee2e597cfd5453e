"""Loads an image generator by name, from a file or from a folder."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fewbytes.base.errors import UserError, import_failed, one_line
from fewbytes.base.named import imported, places
from fewbytes.base.streams import seeded
from fewbytes.generators.compact import SHIPPED, CompactGenerator
from fewbytes.generators.diffusion import StableDiffusion
from fewbytes.generators.protocol import ImageGenerator
from fewbytes.generators.stylegan import load_stylegan


@cache
def load_generator(name: str) -> ImageGenerator:
    """Load a generator by its name, once per process.

    `name` is

    - `compact`: the small generator shipped with the package, of 32 x 32 colour images of plain objects
    - a file `*.safetensors` written by `scripts/train_generator.py`
    - a checkpoint of StyleGAN3 or StyleGAN-XL, a file `*.pkl`: only its numbers are read, no code is run
    - a folder with a Stable Diffusion pipeline of diffusers (`model_index.json`, safetensors weights)
    - `package.module:callable`, your own: called without arguments, it returns a generator, which is tried on two
      images

    Raises UserError for anything else, before any of it is run.
    """
    if not isinstance(name, str):
        raise UserError(f"a generator is given by name, your own as package.module:callable, not as {name!r}")
    with seeded(0, "generator"):  # loading always draws the same numbers, and does not affect other random streams
        if name == "compact":
            return CompactGenerator(SHIPPED)
        path = places(name)[-1]
        if name and path.is_dir():
            return StableDiffusion(path)
        if path.suffix == ".safetensors":
            return CompactGenerator(path)
        if path.suffix == ".pkl":
            return load_stylegan(path)
        module, _, attribute = name.partition(":")
        if not attribute:
            kinds = "compact, a file .safetensors or .pkl, a pipeline's folder, package.module:callable"
            raise UserError(f"there is no generator {name!r}: a generator is {kinds}")
        return _own(module, attribute)


def _own(module: str, attribute: str) -> ImageGenerator:
    name = f"{module}:{attribute}"
    try:
        generator = imported(name)()
    except UserError:
        raise
    except Exception as error:  # importing and calling run the user's code
        raise UserError(f"the generator {name!r} cannot be made: {import_failed(error, module)}") from error
    if not isinstance(generator, ImageGenerator):
        raise UserError(
            f"{name!r} made a {type(generator).__name__}; a generator has latent_dim, sample_latents, synthesise"
        )
    try:
        latents = generator.sample_latents(2)
        images = generator.synthesise(latents)
    except Exception as error:
        raise UserError(f"the generator {name!r} fails: {one_line(error)}") from error
    size = generator.latent_dim
    if not (_floats(latents, 2) and isinstance(size, int) and size > 0 and latents.shape[1] == size):
        raise UserError(f"the generator {name!r} must sample finite float latents (n, {size}), its latent_dim")
    if not _floats(images, 4) or images.min() < 0 or images.max() > 1:
        raise UserError(
            f"the generator {name!r} must synthesise float images (n, channels, height, width) with values in 0..1"
        )
    return generator


def _floats(values: object, dimensions: int) -> bool:
    """Whether `values` are two samples of finite floats, with this number of dimensions in all."""
    return (
        isinstance(values, Tensor)
        and values.is_floating_point()
        and values.dim() == dimensions
        and len(values) == 2
        and bool(torch.isfinite(values).all())
    )
