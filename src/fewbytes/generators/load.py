"""Where an image generator comes from: a name, a file or a folder."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from fewbytes.errors import UserError
from fewbytes.generators.compact import SHIPPED, CompactGenerator
from fewbytes.generators.diffusion import StableDiffusion
from fewbytes.generators.protocol import ImageGenerator
from fewbytes.generators.stylegan import load_stylegan


@cache
def load_generator(name: str) -> ImageGenerator:
    """A generator, loaded once a process. `name` is

    - `compact`: the small one that comes with the package, of 32 x 32 colour images of plain objects
    - a file `*.safetensors` that `scripts/train_generator.py` wrote
    - a checkpoint of StyleGAN3 or StyleGAN-XL, a file `*.pkl`: of it only numbers are read, no code is run
    - a folder with a Stable Diffusion pipeline of diffusers (`model_index.json`, safetensors weights)
    - `package.module:callable`, your own: what it returns when called with nothing

    Raises UserError for anything that is not a generator, before any of it is run.
    """
    path = Path(name)
    if name == "compact":
        return CompactGenerator(SHIPPED)
    if path.is_dir():
        return StableDiffusion(path)
    if path.suffix == ".safetensors":
        return CompactGenerator(path)
    if path.suffix == ".pkl":
        return load_stylegan(path)
    module, _, attribute = name.partition(":")
    if path.exists() or not attribute:
        kinds = "compact, a file .safetensors or .pkl, a pipeline's folder, package.module:callable"
        raise UserError(f"there is no generator {name!r}: a generator is {kinds}")
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
