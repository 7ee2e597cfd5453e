"""Gradient inversion: against golden vectors, on digits, and over runs as the command line makes them."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import fewbytes
from PIL import Image
from runs import configured
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.analysis.attack import (
    attack,
    drawn,
    gradients,
    label_of,
    matching_loss,
    noisy,
    only,
    psnr,
    reconstruct,
    recovered_label,
)
from fewbytes.analysis.settings import Attacking
from fewbytes.base.state import load_state, state_of
from fewbytes.base.streams import seeded
from fewbytes.data import load_dataset
from fewbytes.models import build_model
from fewbytes.models.small import LeNet
from fewbytes.report import read_runs, write_report
from fewbytes.report.leaks import inversion_word

QUICK = Attacking(images=2, iterations=5, restarts=0)
DIGIT = (1, 8, 8)


def made(folder: Path, method: str) -> Path:
    """A run of one round on the digits, as the command line makes it."""
    settings = {"rounds": 1, "clients": 2, "partition": "iid", "samples": "30/10", "model": "lenet"}
    return configured(folder, method, **settings, parameters={"batch": 30})


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("fedavg"), "fedavg")


def lenet(seed: int) -> nn.Module:
    """A LeNet for digits with the attack's weights, float64."""
    with seeded(seed, "lenet"):
        model = LeNet(DIGIT, 10).double()
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def digit(row: int) -> tuple[Tensor, int]:
    x, y = load_dataset("digits").train.take([row]).load()
    return x.double(), int(y)


def attacked(names: list[str], noise: float = 0.0, iterations: int = 40) -> float:
    """The PSNR of a digit made again from the gradients of parameters whose names begin so."""
    victim, attacker = lenet(0), lenet(1)
    x, label = digit(3)
    shared = [name for name, _ in victim.named_parameters() if name.startswith(tuple(names))]
    load_state(attacker, {name: victim.get_parameter(name) for name in shared})
    with seeded(0, "attack"):
        observed = noisy(gradients(victim, x, label, shared), noise)
        found, loss = reconstruct(attacker, observed, label, DIGIT, iterations, restarts=0)
    assert float(matching_loss(attacker, observed, found, label).detach()) == pytest.approx(loss)
    return psnr(x, found.clamp(0, 1))


# ---- the attack ----


@pytest.mark.golden
def test_the_attack_s_formulas(golden):
    vectors = golden("genefl/privacy")

    def state(group: str) -> dict[str, Tensor]:
        names = [name for name in vectors if name.startswith(f"{group}__")]
        return {name.removeprefix(f"{group}__"): torch.from_numpy(vectors[name]) for name in names}

    victim, random = state("victim"), state("attacker_random")
    hidden, features = victim["fc1.weight"].shape
    model = nn.Sequential()
    model.add_module("fc1", nn.Linear(features, hidden))
    model.add_module("sigmoid", nn.Sigmoid())
    model.add_module("fc2", nn.Linear(hidden, len(victim["fc2.bias"])))
    model.double()
    load_state(model, victim)
    label = int(vectors["label"])
    seen = gradients(model, torch.from_numpy(vectors["x_true"])[None], label, list(victim))
    for name, gradient in state("victim_grad").items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-9, atol=1e-9)
    assert recovered_label(seen["fc2.bias"]) == label_of(model, seen) == int(vectors["recovered_label"])
    for shared, begin in {"all": "", "fc1": "fc1.", "fc2": "fc2."}.items():
        names = [name for name in victim if name.startswith(begin)]
        load_state(model, random | {name: victim[name] for name in names})
        x = torch.from_numpy(vectors["x_guess"])[None].requires_grad_()
        loss = matching_loss(model, {name: seen[name] for name in names}, x, label)
        assert float(loss.detach()) == pytest.approx(float(vectors[f"{shared}__loss"]), rel=1e-9)
        slope = torch.autograd.grad(loss, x)[0][0]
        torch.testing.assert_close(slope, torch.from_numpy(vectors[f"{shared}__grad_x"]), rtol=1e-9, atol=1e-9)
    a, b = (torch.from_numpy(vectors[f"image_{name}"]) for name in "ab")
    assert psnr(a, b) == pytest.approx(float(vectors["psnr_ab"]), rel=1e-9)
    assert psnr(a, a) == math.inf


def test_all_gradients_give_the_image_away_and_few_or_noisy_ones_do_not():
    assert attacked([""]) >= 25
    assert attacked(["conv1"]) < 15
    assert attacked([""], noise=1e-3) < 15


def test_noise_has_its_variance():
    torch.manual_seed(0)
    (value,) = noisy({"w": torch.zeros(100_000, dtype=torch.float64)}, 0.04).values()
    assert float(value.var()) == pytest.approx(0.04, rel=0.05)
    assert float(value.mean()) == pytest.approx(0, abs=0.005)


def test_what_is_not_finite_ends_a_start_and_the_best_image_stays():
    class Fragile(nn.Module):
        """Gives nothing finite for large samples."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * torch.where(x.abs().max() > limit, math.nan, 1.0)

    torch.manual_seed(0)
    model, x = Fragile(), torch.tensor([[0.3, 0.8]], dtype=torch.float64)
    for limit in (3.0, 0.0):  # some samples are too large; all are
        names = ["fc.weight", "fc.bias"]
        target = {name: torch.full_like(model.get_parameter(name), 9.0) for name in names}  # far: x grows
        found, loss = reconstruct(model, target, 0, (2,), iterations=5)
        assert found.shape == x.shape
        assert found.isfinite().all()
        assert math.isfinite(loss) == (limit > 0)


def test_a_start_that_ends_in_a_minimum_of_its_own_is_tried_again():
    victim, attacker = lenet(0), lenet(1)
    x, label = digit(3)
    observed = gradients(victim, x, label, ["conv1.weight", "conv1.bias"])
    load_state(attacker, {name: victim.get_parameter(name) for name in observed})
    losses = []
    for restarts in (0, 1):
        torch.manual_seed(3)
        losses.append(reconstruct(attacker, observed, label, DIGIT, 3, restarts)[1])
    assert losses[1] < losses[0]


def test_the_label_is_given_where_the_classifier_s_bias_is_not_seen():
    model = lenet(0)
    x, label = digit(5)
    every = gradients(model, x, label, [name for name, _ in model.named_parameters()])
    assert label_of(model, every) == label
    assert label_of(model, {name: value for name, value in every.items() if name != "fc.bias"}) is None


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 13, 6)])
def test_lenet_takes_images_of_any_shape(shape):
    assert build_model("lenet", shape, 7)(torch.rand(2, *shape)).shape == (2, 7)


def test_a_resnet_with_sigmoids_is_smooth():
    torch.manual_seed(0)
    model = build_model("resnet18-sigmoid:width=2", DIGIT, 10).double().eval()
    assert not any(isinstance(module, nn.ReLU) for module in model.modules())
    assert model.state_dict().keys() == build_model("resnet18:width=2", DIGIT, 10).state_dict().keys()
    x = torch.rand(1, 1, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(model, x)


# ---- runs ----


def test_a_run_attacked_by_the_command_line(fedavg):
    done = fewbytes("attack", fedavg, "--images", "3", "--client", "1", "--iterations", "40", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((fedavg / "attack.json").read_text())
    assert (result["method"], result["model"], result["client"]) == ("fedavg", "lenet", 1)
    assert result["observed_values"] == result["values"]
    assert result["label"] == "recovered"
    assert all(row["label"] == row["recovered_label"] for row in result["attacked"])
    assert len({row["sample"] for row in result["attacked"]}) == 3
    assert min(row["psnr"] for row in result["attacked"]) >= 25
    assert result["recognised"] == 1
    page = (fedavg / "report.html").read_text()
    assert "Gradient inversion" in page
    assert f"sample {result['attacked'][0]['sample']}: {result['attacked'][0]['psnr']:.1f} dB" in page


def test_the_same_seed_gives_the_same_files(fedavg):
    files = [fedavg / "attack.json", fedavg / "attack.png"]
    first, again, other = (
        (attack(fedavg, how=replace(QUICK, seed=seed)), *(file.read_bytes() for file in files)) for seed in (0, 0, 1)
    )
    assert first == again
    assert first[0]["attacked"] != other[0]["attacked"]


def test_the_run_s_own_model_may_be_attacked(fedavg):
    run, random = (attack(fedavg, replace(QUICK, model=model))["attacked"] for model in ("run", "lenet"))
    assert [row["sample"] for row in run] == [row["sample"] for row in random]
    assert run != random


def test_a_method_that_shares_less_shows_less(tmp_path):
    result = attack(made(tmp_path, "partialfed"), how=replace(QUICK, iterations=30))
    assert 0 < result["observed_values"] < result["values"]
    assert result["label"] == "given"
    assert result["psnr_mean"] < 15 < 25 < result["control"]


def test_a_method_that_sends_half_of_its_values_shows_those(fedavg, tmp_path):
    run = made(tmp_path, "fedpurin")
    everything, half = (attack(folder, QUICK)["observed_values"] for folder in (fedavg, run))
    assert everything / 3 < half < everything / 2 + 10
    model, (x, label) = lenet(0), digit(3)
    whole = gradients(model, x, label, list(state_of(model)))
    seen = fb.FedPURIN(tau=0.5).places(model, whole)
    observed = only(whole, seen)
    assert all(bool((observed[name] == torch.where(seen[name], g, 0)).all()) for name, g in whole.items())
    assert float(matching_loss(model, observed, x, label, seen).detach()) == 0
    assert float(matching_loss(model, observed, x, label).detach()) > 0


def test_a_label_is_told_by_a_negative_entry_that_is_seen():
    model = lenet(0)
    bias = torch.tensor([0.1, -0.9, 0.0, 0.2])
    assert label_of(model, {"fc.bias": bias}) == 1
    assert label_of(model, {"fc.bias": bias.clamp(min=0)}) is None


def test_a_control_that_is_not_recognisable_makes_a_result_void(fedavg):
    assert not inversion_word(25.0).startswith("Void")
    assert "25.0 dB" in inversion_word(25.0)
    assert inversion_word(24.9).startswith("Void: ")
    attack(fedavg, replace(QUICK, noise=1.0))
    page = write_report(read_runs([fedavg]), fedavg / "report.html").read_text()
    assert "an image is reconstructed with" in page


def test_the_picture_has_originals_above_reconstructions():
    light, dark = torch.ones(1, 8, 8), torch.zeros(1, 8, 8)
    with Image.open(io.BytesIO(drawn([light, dark], [dark, light], [math.inf, 3.0]))) as picture:
        pixels = picture.convert("L")
        width = pixels.width // 2
        column = [pixels.getpixel((x, y)) for x in (width // 2, width + width // 2) for y in (35, 105)]
        assert column == [255, 0, 0, 255]
        assert pixels.crop((0, 142, width, pixels.height)).getextrema()[0] < 128, "words stand below"


def test_a_report_shows_no_stranger_s_words_as_they_are(fedavg):
    result = attack(fedavg, how=QUICK)
    (fedavg / "attack.json").write_text(json.dumps(result | {"model": "<i>evil", "psnr_mean": None}))
    page = write_report(read_runs([fedavg]), fedavg / "report.html").read_text()
    assert "&lt;i&gt;evil" in page
    assert "<i>evil" not in page
    (fedavg / "attack.png").write_bytes(b"no picture")
    with pytest.raises(fb.UserError, match=r"attack\.png"):
        write_report(read_runs([fedavg]), fedavg / "report.html")
    (fedavg / "attack.json").write_text("{}")
    with pytest.raises(fb.UserError, match=r"attack\.json"):
        read_runs([fedavg])


def test_stopped_early_nothing_is_written(fedavg):
    def stop(done: int, steps: int, text: str) -> None:
        if done == 1:
            raise KeyboardInterrupt

    for name in ("attack.json", "attack.png"):
        (fedavg / name).unlink(missing_ok=True)
    before = sorted(fedavg.iterdir())
    with pytest.raises(KeyboardInterrupt):
        attack(fedavg, how=QUICK, progress=stop)
    assert sorted(fedavg.iterdir()) == before


def test_mistakes_are_told(fedavg, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    (flat / "config.toml").write_text((fedavg / "config.toml").read_text().replace('"fedavg"', '"fedproto"', 1))
    mistakes = {
        "is not a run folder": (tmp_path,),
        "'lenett' .did you mean 'lenet'": (fedavg, Attacking(model="lenett")),
        "no client 7": (fedavg, Attacking(client=7)),
        "30 .*31": (fedavg, Attacking(images=31)),
        "no parameter|no fixed tensors": (flat,),
    }
    for told, arguments in mistakes.items():
        with pytest.raises(fb.UserError, match=told):
            attack(*arguments)


def test_a_mistake_gets_one_line_and_code_2(fedavg):
    done = fewbytes("attack", fedavg, "--noise", "-1")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = (line for line in done.stderr.splitlines() if line.strip())
    assert "noise must be at least 0, not -1.0" in line
