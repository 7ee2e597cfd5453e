"""Image generators: the protocol, the compact one, and one clear line for every file that is none."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fewbytes.base.errors import UserError
from fewbytes.generators import ImageGenerator, load_generator
from fewbytes.generators.compact import SHIPPED

# --- compact ---------------------------------------------------------------------------------------------------------


def test_the_compact_generator_makes_images_that_follow_the_latent() -> None:
    generator = load_generator("compact")
    assert isinstance(generator, ImageGenerator)
    torch.manual_seed(0)
    latents = generator.sample_latents(64)
    images = generator.synthesise(latents)
    assert latents.shape == (64, generator.latent_dim)
    assert images.shape == (64, 3, 32, 32)
    assert latents.dtype == images.dtype == torch.float32
    assert not images.requires_grad
    assert 0 <= images.min() < 0.2
    assert 0.8 < images.max() <= 1
    near = generator.synthesise(latents + 0.05 * torch.randn_like(latents))
    step, apart = (near - images).abs().mean((1, 2, 3)), (images.roll(1, 0) - images).abs().mean((1, 2, 3))
    assert (step > 0).all()
    assert step.mean() < 0.2 * apart.mean()
    assert apart.min() > 0.05


def test_the_same_latents_and_the_same_seed_give_the_same_images() -> None:
    first, second = load_generator("compact"), load_generator.__wrapped__("compact")
    torch.manual_seed(1)
    latents = first.sample_latents(4)
    torch.manual_seed(1)
    assert torch.equal(second.sample_latents(4), latents)
    assert torch.equal(first.synthesise(latents), second.synthesise(latents))
    assert load_generator("compact") is first


def test_latents_have_about_zero_mean_and_unit_variance() -> None:
    torch.manual_seed(2)
    latents = load_generator("compact").sample_latents(2000)
    assert latents.mean(0).abs().max() < 0.1
    assert (latents.std(0) - 1).abs().max() < 0.1


def test_latents_of_another_size_are_refused() -> None:
    with pytest.raises(UserError, match=r"\(n, 128\), not \(3, 127\)"):
        load_generator("compact").synthesise(torch.zeros(3, 127))


def test_the_shipped_file_is_small() -> None:
    assert SHIPPED.stat().st_size <= 4_000_000


def test_a_file_of_ones_own_is_loaded_by_its_path(tmp_path: Path) -> None:
    own = tmp_path / "own.safetensors"
    own.write_bytes(SHIPPED.read_bytes())
    latents = torch.ones(2, 128)
    assert torch.equal(load_generator(str(own)).synthesise(latents), load_generator("compact").synthesise(latents))


def _rewrite(path: Path, change: dict[str, torch.Tensor | None], kind: str = "compact") -> None:
    tensors = {name: value for name, value in (load_file(SHIPPED) | change).items() if value is not None}
    save_file(tensors, path, {"fewbytes": json.dumps({"generator": kind})})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"background.bias": None}, "'background.bias' .*fit"),
        ({"extra": torch.zeros(2)}, "'extra' .*fit"),
        ({"background.bias": torch.zeros(4)}, "'background.bias' .*fit"),
        ({"background.bias": torch.tensor([0.0, float("nan"), 0.0])}, "'background.bias' .*not fin"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, torch.Tensor | None], text: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.safetensors"
    _rewrite(path, change)
    with pytest.raises(UserError, match=text) as caught:
        load_generator(str(path))
    assert "\n" not in str(caught.value)


def test_files_that_are_no_compact_generator_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    good = SHIPPED.read_bytes()
    for damaged in (b"", b"not safetensors at all", good[:-1], good[:1000]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read"):
            load_generator(str(path))
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(UserError, match="not a compact generator"):
        load_generator(str(path))
    _rewrite(path, {}, kind="another")
    with pytest.raises(UserError, match="not a compact generator"):
        load_generator(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        load_generator(str(tmp_path / "absent.safetensors"))


def test_the_shipped_file_says_what_made_it() -> None:
    with safe_open(SHIPPED, "pt") as file:
        assert {"pictures", "steps", "seed"} <= json.loads(file.metadata()["fewbytes"]).keys()


# Loading --------------------------------------------------------------------------------------------------------------


class Own:
    """A generator in order, of which the tests below spoil something."""

    latent_dim = 5

    def sample_latents(self, n):
        return torch.randn(n, 5)

    def synthesise(self, latents):
        return latents.sigmoid()[:, :3, None, None].expand(-1, -1, 4, 4)


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        ({"latent_dim": 6}, "sample finite"),
        ({"sample_latents": lambda self, n: torch.full((n, 5), float("nan"))}, "sample finite"),
        ({"synthesise": lambda self, latents: latents}, "synthesise float"),
        ({"synthesise": lambda self, latents: torch.full((2, 3, 4, 4), float("inf"))}, "synthesise"),
        ({"synthesise": lambda self, latents: torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)}, "synthesise"),
        ({"synthesise": lambda self, latents: torch.full((2, 3, 4, 4), 3.0)}, "0..1"),
        ({"synthesise": lambda self, latents: torch.zeros(1, 3, 4, 4)}, "synthesise"),
        ({"synthesise": lambda self, latents: 1 / 0}, "ZeroDivisionError"),
    ],
)
def test_an_own_generator_that_does_not_keep_its_word_is_told(spoilt, words, monkeypatch):
    module = types.ModuleType("own_generator")
    module.good, module.bad = Own, type("Bad", (Own,), spoilt)
    monkeypatch.setitem(sys.modules, "own_generator", module)
    assert load_generator.__wrapped__("own_generator:good").latent_dim == 5
    with pytest.raises(UserError, match=words):
        load_generator.__wrapped__("own_generator:bad")


@pytest.mark.parametrize("name", ["", "nobody", 3, "tests"])
def test_what_is_no_generator_is_told(name):
    with pytest.raises(UserError, match="generator"):
        load_generator(name)


def test_loading_shifts_nobodys_randomness():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    load_generator.__wrapped__("compact")
    assert torch.equal(torch.get_rng_state(), before)
