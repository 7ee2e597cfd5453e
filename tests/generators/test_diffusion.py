"""A tiny Stable Diffusion of random weights makes images of latent vectors; damaged folders are refused."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from modules import needs
from safetensors.torch import load_file, save_file

from fewbytes.base.errors import UserError
from fewbytes.generators import ImageGenerator, load_generator
from fewbytes.generators.diffusion import StableDiffusion

needs("diffusers", "transformers")

WORDS = ["<|startoftext|>", "<|endoftext|>", *"acdgot", *(f"{letter}</w>" for letter in "acdgot")]
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of 16 x 16 images, as diffusers saves it."""
    import diffusers
    import transformers

    folder = tmp_path_factory.mktemp("pipeline")
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(WORDS)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    torch.manual_seed(0)
    widths, groups = (4, 8), {"norm_num_groups": 2, "layers_per_block": 1}
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=widths, cross_attention_dim=8, attention_head_dim=2, **groups,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        latent_channels=4, block_out_channels=widths, **groups,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    text = transformers.CLIPTextConfig(
        vocab_size=len(WORDS), hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    tokenizer = transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16)
    scheduler = diffusers.PNDMScheduler(
        beta_schedule="scaled_linear", skip_prk_steps=True, set_alpha_to_one=False, steps_offset=1
    )
    pipeline = diffusers.StableDiffusionPipeline(
        vae=vae, unet=unet, text_encoder=transformers.CLIPTextModel(text), tokenizer=tokenizer, scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.save_pretrained(folder / "tiny")
    return folder / "tiny"


@pytest.fixture(scope="module")
def tiny(saved: Path) -> StableDiffusion:
    return StableDiffusion(saved, steps=2)


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return shutil.copytree(saved, tmp_path / "copy")


def no_network(*_: object) -> None:
    raise AssertionError("the network was asked")


def test_a_folder_is_loaded_without_network_and_without_touching_the_seed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    before = torch.random.get_rng_state()
    generator = load_generator(str(folder))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert isinstance(generator, ImageGenerator)
    assert isinstance(generator, StableDiffusion)
    assert (generator.prompt, generator.steps, generator.guidance) == ("a cat", 50, 7.5)
    assert generator.latent_dim == 4 * 8 * 8


def test_a_folder_as_stable_diffusion_1_5_was_published_is_the_same_generator(
    saved: Path, folder: Path, tiny: StableDiffusion
) -> None:
    """Older names of weights, a buffer more, the tokenizer as two files, a safety checker that is not loaded."""
    text, vae = folder / "text_encoder/model.safetensors", folder / "vae/diffusion_pytorch_model.safetensors"
    state = {f"text_model.{name.removeprefix('text_model.')}": value for name, value in load_file(text).items()}
    state["text_model.embeddings.position_ids"] = torch.arange(16)[None]
    save_file(state, text, metadata={"format": "pt"})
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = {}
    for name, value in load_file(vae).items():
        for new, old in names.items():
            name = name.replace(f".{new}.", f".{old}.")
        state[name] = value
    assert any(".proj_attn." in name for name in state)
    save_file(state, vae, metadata={"format": "pt"})
    shutil.rmtree(folder / "tokenizer")
    (folder / "tokenizer").mkdir()
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(saved.parent / name, folder / "tokenizer")
    (folder / "tokenizer/tokenizer_config.json").write_text(
        '{"model_max_length": 16, "tokenizer_class": "CLIPTokenizer"}'
    )
    checker = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    rewrite("model_index.json", lambda j: j.update(safety_checker=checker, requires_safety_checker=True))(folder)
    latents = tiny.sample_latents(2)
    assert torch.equal(StableDiffusion(folder, steps=2).synthesise(latents), tiny.synthesise(latents))


def test_latents_are_standard_normal_from_the_global_seed(tiny: StableDiffusion) -> None:
    torch.manual_seed(1)
    latents = tiny.sample_latents(200)
    assert latents.shape == (200, 256)
    assert latents.dtype == torch.float32
    assert abs(latents.mean()) < 0.02
    assert abs(latents.std() - 1) < 0.02
    torch.manual_seed(1)
    assert torch.equal(tiny.sample_latents(200), latents)


def test_the_same_latents_give_the_same_images_and_others_do_not(tiny: StableDiffusion) -> None:
    torch.manual_seed(2)
    latents = tiny.sample_latents(5).requires_grad_()
    before = torch.random.get_rng_state()
    images = tiny.synthesise(latents)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert images.shape == (5, 3, 16, 16)
    assert images.dtype == torch.float32
    assert not images.requires_grad
    assert images.min() >= 0
    assert images.max() <= 1
    assert torch.equal(tiny.synthesise(latents), images)
    torch.testing.assert_close(tiny.synthesise(latents[3:]), images[3:])  # the batch does not matter
    assert (images[0] - images[1]).abs().mean() > 0.01


def test_prompt_steps_and_guidance_matter(saved: Path, tiny: StableDiffusion) -> None:
    latents = tiny.sample_latents(1)
    images = tiny.synthesise(latents)
    for others in ({"steps": 3}, {"steps": 2, "prompt": "a dog"}, {"steps": 2, "guidance": 1.0}):
        assert not torch.equal(StableDiffusion(saved, **others).synthesise(latents), images)


def test_ddim_draws_no_noise_either(folder: Path, tiny: StableDiffusion) -> None:
    rewrite("model_index.json", lambda j: j.update(scheduler=["diffusers", "DDIMScheduler"]))(folder)
    rewrite("scheduler/scheduler_config.json", lambda j: j.update(clip_sample=False))(folder)
    generator, latents = StableDiffusion(folder, steps=2), tiny.sample_latents(1)
    images = generator.synthesise(latents)
    assert torch.equal(generator.synthesise(latents), images)
    assert not torch.equal(tiny.synthesise(latents), images)


def test_the_first_latent_is_the_vector(tiny: StableDiffusion) -> None:
    """What the U-Net is given first, with and without the prompt."""
    seen: list[torch.Tensor] = []
    hook = tiny._pipeline.unet.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    latents = tiny.sample_latents(1)
    tiny.synthesise(latents)
    hook.remove()
    assert torch.equal(seen[0].flatten(1), latents.repeat(2, 1))


@pytest.mark.parametrize("shape", [(2, 255), (2, 257), (256,), (1, 4, 8, 8)])
def test_latents_of_another_size_are_refused(tiny: StableDiffusion, shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"\(n, 256\)"):
        tiny.synthesise(torch.zeros(shape))


def rewrite(path: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    """A change of a JSON file."""

    def apply(folder: Path) -> None:
        content = json.loads((folder / path).read_text())
        change(content)
        (folder / path).write_text(json.dumps(content))

    return apply


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def lose(folder: Path) -> None:
    state = load_file(folder / WEIGHTS)
    del state["conv_in.weight"]
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "unet/diffusion_pytorch_model.bin")
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: (f / "model_index.json").unlink(), "model_index.json"),
        (lambda f: (f / "model_index.json").write_text("{"), "model_index.json cannot be read"),
        (lambda f: (f / "model_index.json").write_text("[]"), "model_index.json cannot be read"),
        (rewrite("model_index.json", lambda j: j.update(_class_name="FluxPipeline")), "holds a FluxPipeline"),
        (rewrite("model_index.json", lambda j: j.update(scheduler=["os", "system"])), "has the scheduler system"),
        (rewrite("model_index.json", lambda j: j.update(scheduler=["x", "DDPMScheduler"])), "may draw noise"),
        (rewrite("unet/config.json", lambda j: j.update(in_channels=5)), "cannot be loaded"),
        (lambda f: (f / "unet/config.json").unlink(), "cannot be loaded"),
        (lambda f: (f / "text_encoder/config.json").write_text("no"), "cannot be loaded"),
        (lambda f: shutil.rmtree(f / "tokenizer"), "cannot be loaded"),
        (lambda f: shutil.rmtree(f / "scheduler"), "cannot be loaded"),
        (lambda f: shutil.rmtree(f / "vae"), "vae holds no .safetensors file; download"),
        (cut, "cannot be loaded"),
        (lose, "unet lacks conv_in.weight"),
        (pickled, "unet holds no .safetensors file; its .bin files are pickles"),
    ],
)  # fmt: skip
def test_other_and_damaged_folders_are_refused_in_one_line(
    folder: Path, damage: Callable[[Path], None], told: str
) -> None:
    damage(folder)
    with pytest.raises(UserError) as refused:
        load_generator(str(folder))
    assert told in str(refused.value)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_classes_a_folder_names_are_not_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    rewrite("model_index.json", lambda j: j.update(unet=["evil", "Unet"], safety_checker=["evil", "Checker"]))(folder)
    assert StableDiffusion(folder, steps=2).latent_dim == 256


def test_without_diffusers_the_way_to_get_it_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UserError, match=r"pip install 'fewbytes\[generators\]'"):
        StableDiffusion(folder)
