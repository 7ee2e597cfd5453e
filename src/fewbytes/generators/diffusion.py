"""Stable Diffusion as a generator: a pipeline folder of diffusers; a latent vector is the initial noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewbytes.base.errors import UserError
from fewbytes.generators.protocol import check_latents

SCHEDULERS = ("DDIMScheduler", "PNDMScheduler")  # they draw only the initial noise, with standard deviation 1
BATCH = 4  # images denoised at a time


class StableDiffusion:
    """A folder written by `StableDiffusionPipeline.save_pretrained`: `model_index.json` and a folder for each part.

    Defaults are FedKTL's (4.8): one prompt for all images, 50 steps, guidance 7.5. A latent vector is the initial noise
    (channels, height / 8, width / 8), flattened: 16,384 numbers for Stable Diffusion 1.5 and its 512 x 512 images. Only
    local safetensors files are read, never the network; there is no safety checker. Raises UserError for a folder of
    another kind, for pickled, missing or damaged weights, and if diffusers is not installed.
    """

    def __init__(
        self, folder: Path | str, *, prompt: str = "a cat", steps: int = 50, guidance: float = 7.5, device: str = "cpu"
    ) -> None:
        self.prompt, self.steps, self.guidance = prompt, steps, guidance
        self._pipeline = _load(Path(folder)).to(device)
        config = self._pipeline.unet.config
        size = config.sample_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        self._shape = (config.in_channels, height, width)
        self.latent_dim: int = config.in_channels * height * width

    def sample_latents(self, n: int) -> Tensor:
        """Initial noise, standard normal, float32 (n, latent_dim)."""
        return torch.randn(n, self.latent_dim)

    def synthesise(self, latents: Tensor) -> Tensor:
        """Denoise the noise (n, latent_dim) into images, float32 (n, 3, height, width) in [0, 1]."""
        check_latents(latents, self.latent_dim)
        return torch.cat([self._images(part.view(-1, *self._shape)) for part in latents.detach().split(BATCH)])

    def _images(self, latents: Tensor) -> Tensor:
        images: Tensor = self._pipeline(
            [self.prompt] * len(latents),
            latents=latents,
            num_inference_steps=self.steps,
            guidance_scale=self.guidance,
            eta=0.0,
            output_type="pt",
        ).images
        return images.float().cpu()


def _load(folder: Path) -> Any:
    """Load the pipeline in float32. Classes are fixed here; of the names in the folder only the scheduler's is used."""
    scheduler = _scheduler_of(folder)
    for part in ("unet", "vae", "text_encoder"):
        if not any((folder / part).glob("*.safetensors")):
            raise UserError(f"{folder / part} holds no .safetensors file; {_remedy(folder / part)}")
    try:
        import diffusers
        import transformers
    except ImportError as error:
        text = " ".join(str(error).split())
        raise UserError(f"Stable Diffusion needs diffusers: pip install 'fewbytes[generators]' ({text})") from None
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):  # modules draw random weights before real ones are loaded
            pipeline = diffusers.StableDiffusionPipeline(
                vae=_filled(diffusers.AutoencoderKL, folder / "vae", low_cpu_mem_usage=False),
                text_encoder=_filled(transformers.CLIPTextModel, folder / "text_encoder"),
                tokenizer=transformers.CLIPTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True),
                unet=_filled(diffusers.UNet2DConditionModel, folder / "unet", low_cpu_mem_usage=False),
                scheduler=getattr(diffusers, scheduler).from_pretrained(folder / "scheduler", local_files_only=True),
                safety_checker=None,
                feature_extractor=None,
                requires_safety_checker=False,
            )
    except Exception as error:  # any error of the libraries for damaged files
        text = " ".join(str(error).split())[:300]
        raise UserError(f"the pipeline {folder} cannot be loaded: {type(error).__name__}: {text}") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _scheduler_of(folder: Path) -> str:
    """The name of the scheduler of a Stable Diffusion pipeline."""
    index = folder / "model_index.json"
    try:
        parts = json.loads(index.read_bytes())
        kind, scheduler = parts["_class_name"], parts["scheduler"][1]
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not a generator: a folder must hold a pipeline of diffusers, model_index.json"
        ) from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{index} cannot be read: {type(error).__name__}: {error}") from None
    if kind != "StableDiffusionPipeline":
        raise UserError(f"{folder} holds a {kind}; only StableDiffusionPipeline is supported")
    if scheduler not in SCHEDULERS:
        raise UserError(
            f"{folder} has the scheduler {scheduler}, which may draw noise: save it with {' or '.join(SCHEDULERS)}"
        )
    return str(scheduler)


def _filled(cls: Any, folder: Path, **options: Any) -> Any:
    """A model with all its weights, in float32."""
    model, loading = cls.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
    )
    if loading["missing_keys"]:
        raise ValueError(f"{folder.name} lacks {', '.join(sorted(loading['missing_keys'])[:3])}")
    return model.float()


def _remedy(folder: Path) -> str:
    if any(folder.glob("*.bin")):
        return (
            "its .bin files are pickles, which are never opened: save the pipeline again with safe_serialization=True"
        )
    return "download or save the pipeline again"
