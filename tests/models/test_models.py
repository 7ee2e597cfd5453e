"""Models by name: the papers' parameter counts and names, and one clear line for every wrong name."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.core.training import prepared, ready
from fewbytes.models import PooledFeatures, batch_norm_names, build_model
from fewbytes.models.blocks import classifier_of, cut, features_of, head_of
from fewbytes.models.build import MIXES, ModelBuilder
from fewbytes.models.builders import default_model
from fewbytes.models.files import load_model, save_model
from fewbytes.models.kgf import Kernels, with_generated_kernels
from fewbytes.models.resnet import ResNet


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def build_meta(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model without storage, run once without arithmetic: enough for sizes and shapes, and quick."""
    with torch.device("meta"):
        model = build_model(name, shape, classes)
        assert model(torch.empty(4, *shape)).shape == (4, classes)
    return model


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("resnet8", (1, 28, 28), 10, 1_229_002),  # FedPURIN
        ("resnet8", (3, 32, 32), 10, 1_235_274),
        ("resnet10:stem=7x7", (3, 32, 32), 100, 4_957_092),
        ("resnet18", (3, 32, 32), 10, 11_173_962),  # GENE-FL
        ("resnet10:width=32,stem=3x3", (3, 32, 32), 10, 1_228_970),  # FuseFL
        ("resnet18:width=32", (3, 32, 32), 10, 2_797_610),
        ("resnet26:width=32", (3, 32, 32), 10, 4_366_250),
        ("cnn4", (3, 32, 32), 10, 878_538),  # FedKTL
        ("mlp", (1, 8, 8), 10, 65 * 200 + 201 * 10),
        ("mlp:hidden=50", (64,), 10, 65 * 50 + 51 * 10),
    ],
)
def test_sizes_are_the_papers(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    assert size(build_meta(name, shape, classes)) == parameters


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("cnn4", 924_708), ("torchvision:googlenet", 5_651_204), ("torchvision:mobilenet_v2", 2_275_172),
        ("resnet4", 134_820), ("resnet6", 364_964), ("resnet8", 1_284_004), ("resnet10:stem=7x7", 4_957_092),
        ("resnet18:stem=7x7", 11_227_812), ("resnet34:stem=7x7", 21_335_972), ("resnet50:stem=7x7", 23_559_332),
        ("torchvision:vit_b_16", 85_728_100 - 769 * 100 + 513 * 768 + 769 * 100),
    ],
)  # fmt: skip
def test_sizes_with_512_features_are_fedktls(name: str, total: int) -> None:
    if name.startswith("torchvision"):
        pytest.importorskip("torchvision")
    assert size(build_meta(f"{name}@512", (3, 32, 32), 100)) == total


@pytest.mark.parametrize("name", ["resnet4", "resnet6", "resnet8", "resnet10", "resnet50:width=8"])
@pytest.mark.parametrize("side", [1, 8, 33])
def test_resnets_take_images_of_any_size(name: str, side: int) -> None:
    build_meta(name, (2, side, side), 3)


def test_resnet_names_and_initial_weights() -> None:
    torch.manual_seed(0)
    model = build_model("resnet8", (3, 32, 32), 10)
    names = {name for name, _ in model.named_parameters()}
    assert {"pre_conv.weight", "pre_bn.bias", "layers.2.0.conv1.weight", "layers.1.0.bn2.weight", "fc.bias"} <= names
    assert {"layers.1.0.shortcut.0.weight", "layers.1.0.shortcut.1.weight"} <= names
    assert not any(name.startswith("layers.0.0.shortcut") for name in names)
    assert model.get_submodule("layers")(torch.rand(2, 64, 8, 8)).shape == (2, 256, 2, 2)  # halved twice
    norms = batch_norm_names(model)
    assert sum(model.get_parameter(name).numel() for name in norms) == 2688  # FedPURIN's table
    for name, value in model.named_parameters():
        if name in norms:
            assert value.eq(1.0 if name.endswith("weight") else 0.0).all()
        elif value.ndim == 4:  # Kaiming normal, fan-out
            expected = (2 / (value.shape[0] * value.shape[2] * value.shape[3])) ** 0.5
            assert value.std().item() == pytest.approx(expected, rel=0.05)
    torch.manual_seed(0)
    again = build_model("resnet8", (3, 32, 32), 10)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 4, 7, 8, 15, 16])
def test_narrow_shortcuts_compute_channels_last_what_they_do_otherwise(channels: int, generated: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Conv2d(channels, 16, 1, stride=2))
    plain = with_generated_kernels(layer, Kernels(4)) if generated else layer
    models = [prepared(prepared(copy.deepcopy(plain)))]
    models.append(copy.deepcopy(models[0]))
    assert [*models[0].state_dict()] == [*plain.state_dict()]
    for samples in (32, 7, 2):
        x = torch.randn(samples, channels, 28, 27)
        weights = torch.randn(len(x), 16, 14, 14)
        gradients = []
        for model in (*models, plain):
            own = (x if model is plain else ready(x)).clone().requires_grad_()
            model.zero_grad()
            (model(own) * weights).sum().backward()
            gradients.append([own.grad, *(p.grad for p in model.parameters())])
        torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
        torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-2, atol=1e-2)


def test_narrow_shortcuts_overwrite_no_memory() -> None:
    script = """
import torch
from torch import nn
from fewbytes.core.training import prepared, ready

torch.set_num_threads(1)
for channels in (4, 7, 8, 15):
    model = prepared(nn.Sequential(nn.Conv2d(channels, 16, 1, stride=2)))
    for samples in (32, 7, 2) * 30:
        model(ready(torch.randn(samples, channels, 28, 28))).sum().backward()
        freed = [torch.randn(size) for size in (5, 10, 33, 100, 1000)]
"""
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


def test_batch_norm_is_found_by_type_not_by_name() -> None:
    model = nn.Sequential()
    model.add_module("bn_looking", nn.Linear(2, 2))
    model.add_module("plain", nn.BatchNorm1d(2))
    model.add_module("group", nn.GroupNorm(1, 2))
    model.add_module("frozen", nn.BatchNorm1d(2, affine=False))
    assert batch_norm_names(model) == {"plain.weight", "plain.bias"}
    assert batch_norm_names(nn.BatchNorm2d(3)) == {"weight", "bias"}


@pytest.mark.parametrize("side", [16, 28, 64])
def test_cnn4_takes_16_pixels_and_more(side: int) -> None:
    build_meta("cnn4", (1, side, side), 5)


@pytest.mark.parametrize("name", ["mlp", "cnn4", "resnet8:width=4", "resnet18:width=4", "resnet50:width=4"])
def test_every_parameter_gets_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, (1, 16, 16), 2)
    loss = nn.functional.cross_entropy(model(torch.rand(4, 1, 16, 16)), torch.tensor([0, 1, 1, 1]))
    for gradient in torch.autograd.grad(loss, list(model.parameters())):  # raises for an unused parameter
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize("shape", [(64,), (1, 8, 8), (1, 15, 40), (1, 16, 16), (3, 32, 32), (3, 4, 8, 8)])
def test_default_model_works(shape: tuple[int, ...]) -> None:
    assert build_model(default_model(shape), shape, 4)(torch.rand(2, *shape)).shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "channels"), [("mobilenet_v2", 1), ("mobilenet_v2", 3), ("googlenet", 1), ("squeezenet1_1", 4)]
)
def test_torchvision_by_name(name: str, channels: int) -> None:
    pytest.importorskip("torchvision")
    build_meta(f"torchvision:{name}", (channels, 32, 32), 7)


def test_torchvision_vision_transformer_is_made_for_the_image() -> None:
    pytest.importorskip("torchvision")
    build_meta("torchvision:vit_b_32", (3, 32, 32), 7)


POOLED = [
    ("cnn4", (1, 16, 16), "fc"),
    ("mlp:hidden=48", (5,), "fc"),
    ("torchvision:mobilenet_v2", (3, 32, 32), "classifier.1"),
]


@pytest.mark.parametrize(("name", "shape", "last"), POOLED)
@pytest.mark.parametrize("features", [7, 64, 1500])
def test_pooled_features_are_the_adaptive_average_of_the_models_own(
    name: str, shape: tuple[int, ...], last: str, features: int
) -> None:
    if name.startswith("torchvision"):
        pytest.importorskip("torchvision")
    own = build_model(name, shape, 5).eval()
    seen: list[torch.Tensor] = []
    own.get_submodule(last).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model = build_model(f"{name}@{features}", shape, 5).eval()
    lacking, left = model.get_submodule("body").load_state_dict(own.state_dict(), strict=False)
    assert (lacking, left) == ([], [f"{last}.weight", f"{last}.bias"])
    x = torch.rand(3, *shape)
    own(x)
    found = features_of(model)(x)
    assert torch.equal(found, nn.AdaptiveAvgPool1d(features)(seen[0]))
    assert torch.equal(classifier_of(model)(found), model(x))
    assert [name for name, _ in model.named_modules()][-1] == "fc"


def test_pooling_averages_windows_of_long_features_and_repeats_short_ones() -> None:
    def pooled(features: list[float], size: int) -> list[float]:
        body = nn.Sequential(nn.Identity(), nn.Linear(len(features), 2))
        return features_of(PooledFeatures(body, size, 3))(torch.tensor([features]).float())[0].tolist()

    assert pooled([1, 3, 5, 9], 2) == [2, 7]
    assert pooled([1, 3, 5], 2) == [2, 4]  # overlapping
    assert pooled([1, 3], 4) == [1, 1, 3, 3]
    assert pooled([1, 3, 5], 3) == [1, 3, 5]


@pytest.mark.parametrize("name", ["cnn4@9", "resnet8:width=4@100", "torchvision:googlenet@32"])
def test_every_parameter_of_a_pooled_model_gets_a_gradient(name: str) -> None:
    if name.startswith("torchvision"):
        pytest.importorskip("torchvision")
    model = build_model(name, (3, 32, 32), 2).train()
    model(torch.rand(2, 3, 32, 32)).logsumexp(1).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_a_pooled_model_is_cut_like_the_one_it_is_made_of() -> None:
    plain, pooled = (build_model(f"resnet10:width=4{at}", (3, 32, 32), 5) for at in ("", "@6"))
    for blocks in (1, 2, 3, 4):
        names = [[f"body.{name}" for name in part.state()] for part in cut(plain, blocks)]
        assert [list(part.state()) for part in cut(pooled, blocks)] == names


def test_vision_transformers_get_two_linear_layers_behind_pooled_features() -> None:
    pytest.importorskip("torchvision")
    model = build_meta("torchvision:vit_b_32@512", (3, 32, 32), 7)
    assert isinstance(model, PooledFeatures)
    assert [str(layer) for layer in model.classifier.children()] == [
        str(nn.Linear(512, 768)), "Tanh()", str(nn.Linear(768, 7))
    ]  # fmt: skip
    assert features_of(model)(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 512)
    assert head_of(model) is model.classifier


def test_a_mix_goes_to_the_clients_in_turn() -> None:
    assert {name: len(models) for name, models in MIXES.items()} == {
        "HtFE2": 2, "HtFE3": 3, "HtFE4": 4, "HtFE8": 8, "HtFE9": 9, "HtM10": 10,
    }  # fmt: skip
    assert ModelBuilder("HtFE2", (3, 32, 32), 5).names == ["cnn4@512", "resnet18:stem=7x7@512"]
    build = ModelBuilder("htfe3@64+cnn4@64", (3, 32, 32), 5)
    assert build.names == ["resnet10:stem=7x7@64", "resnet18:stem=7x7@64", "resnet34:stem=7x7@64", "cnn4@64"]
    assert [build.architecture(client) for client in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert size(build(3)) == size(build_model("cnn4@64", (3, 32, 32), 5))
    assert ModelBuilder("HtM10", (3, 32, 32), 5).names[8:] == ["torchvision:vit_b_16@512", "torchvision:vit_b_32@512"]


def test_the_resnets_of_a_mix_have_one_stem_unless_they_name_others() -> None:
    def stems(names: str, side: int = 64) -> list[int]:
        build = ModelBuilder(names, (3, side, side), 3)
        made = [build(client) for client in range(len(build.names))]
        return [next(m.kernel_size[0] for m in each.modules() if isinstance(m, nn.Conv2d)) for each in made]  # type: ignore[misc]

    assert stems("resnet10:width=2+resnet26:width=2+resnet18:width=2") == [3, 3, 3]  # as FuseFL mixes them
    assert stems("resnet10@4+cnn4+resnet8:width=2,stem=3x3") == [3, 5, 3]
    assert stems("resnet10:stem=7x7+resnet4+resnet18:width=2@4") == [7, 3, 3]
    assert stems("resnet10+resnet18:width=2,stem=7x7") == [7, 7]
    assert (stems("resnet10"), stems("resnet4+resnet6")) == ([7], [7, 7])
    assert stems("HtFE3@4+resnet8:width=2,stem=3x3", 16) == [7, 7, 7, 3]  # FedKTL's mix states its own
    mixed, alone = (ModelBuilder(names, (3, 64, 64), 3) for names in ("resnet10+resnet18", "resnet10:stem=3x3"))
    assert mixed.names[0] == alone.names[0]


@pytest.mark.parametrize(
    ("name", "side", "kernel"),
    [("resnet8", 8, 3), ("resnet8", 16, 3), ("resnet8", 17, 7), ("resnet8", 28, 7), ("resnet10", 32, 3),
     ("resnet10", 64, 7), ("resnet4", 8, 7), ("resnet18", 64, 3), ("resnet8:stem=7x7", 8, 7)],
)  # fmt: skip
def test_a_small_image_gets_a_small_stem_so_that_the_last_stage_sees_more_than_a_pixel(
    name: str, side: int, kernel: int
) -> None:
    model = build_model(name if ":" in name else f"{name}:width=4", (1, side, side), 3)
    assert isinstance(model, ResNet)
    assert model.pre_conv.kernel_size == (kernel, kernel)
    seen: list[tuple[int, ...]] = []
    model.layers.register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape[2:])))
    model.eval()(torch.zeros(2, 1, side, side))
    assert min(seen[0]) > 1 or "stem" in name


def test_a_saved_model_of_a_mix_is_loaded_from_the_mixes_name(tmp_path: Path) -> None:
    about = {"model": "HtFE2@64", "sample_shape": [3, 16, 16], "classes": 3}
    build = ModelBuilder("HtFE2@64", (3, 16, 16), 3)
    for client in (2, 5):
        model = build(client).eval()
        save_model(model, tmp_path / "models" / f"client-{client}.safetensors", about)
        x = torch.rand(2, 3, 16, 16)
        assert torch.equal(load_model(tmp_path, client=client)(x), model(x))


OWN = """
import torch
from torch import nn
def by_shape(shape, classes): return nn.Linear(shape[0], classes)
class Net(nn.Linear):
    def __init__(self, num_classes, in_channels=1, extra=None): super().__init__(in_channels, num_classes)
def bare(): return nn.Identity()
def failing(classes): raise RuntimeError("two\\nlines")
def wrong(): return "text"
def layered(shape, classes): return nn.Sequential(nn.Linear(shape[0], 9), nn.ReLU(), nn.Linear(9, classes))
constant = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_models.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import nothing_of_that_name")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    return "own_models"


def test_own_callables(own: str) -> None:
    assert build_model(f"{own}:by_shape", (6,), 4)(torch.rand(2, 6)).shape == (2, 4)
    assert build_model(f"{own}:Net", (3, 2, 2), 4)(torch.rand(2, 3)).shape == (2, 4)
    assert isinstance(build_model(f"{own}:bare", (6,), 4), nn.Identity)
    pooled = build_model(f"{own}:layered@3", (6,), 4)
    assert size(pooled) == 7 * 9 + 4 * 4
    assert features_of(pooled)(torch.rand(2, 6)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_models:failing", "RuntimeError: two lines"),
        ("own_models:wrong", "returned a str"),
        ("own_models:bare@8", "Identity has no Linear"),
        ("own_models:by_shape@8", "Linear has no Linear"),
        ("own_models:constant", "is a int"),
        ("own_models:missing", "cannot import.*missing'$"),
        ("own_broken:x", "cannot import.*nothing_of_that_name'$"),
        ("no_such_module:x", r"cannot import.*is its folder on PYTHONPATH\?$"),
        ("no_such.module:x", r"cannot import.*is its folder on PYTHONPATH\?$"),
    ],
)
def test_own_callables_that_do_not_work(own: str, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        build_model(name, (6,), 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("resnet81", (3, 32, 32), "'resnet81'.*did you mean 'resnet8"),
        ("resnet12:width=3", (3, 32, 32), "unknown model 'resnet12'"),
        ("", (3, 32, 32), "unknown model ''"),
        ("resnet18:widht=3", (3, 32, 32), "'widht'.*width, stem"),
        ("resnet18:width=-3", (3, 32, 32), "1 to 1024 for width"),
        ("resnet18:stem=5x5", (3, 32, 32), "it is 7x7 or 3x3"),
        ("cnn4:width=3", (3, 32, 32), "it takes none"),
        ("cnn4@0", (3, 32, 32), "'cnn4@0' .*after @, not '0'"),
        ("cnn4@x", (3, 32, 32), "after @, not 'x'"),
        ("mlp:hidden=8@", (64,), "after @, not ''"),
        ("@", (64,), "after @, not ''"),
        ("cnn4@8@8", (3, 32, 32), "not '8@8'"),
        ("@8", (64,), "unknown model ''"),
        ("cnn5@8", (3, 32, 32), "'cnn5'.*did you mean 'cnn4'"),
        ("HtFE7", (3, 32, 32), "'HtFE7'.*did you mean 'HtFE.* HtFE2, HtFE3"),
        ("htfe2@64", (3, 32, 32), "'htfe2@64' is a mix.*cnn4@64, resnet18:stem=7x7@64"),
        ("torchvision:squeezenet1_1@8", (3, 32, 32), "SqueezeNet has no Linear"),
        ("resnet18", (64,), "use mlp"),
        ("cnn4", (1, 15, 32), "16 x 16.*use mlp or resnet8"),
        ("torchvision:mobilenet_v9", (3, 32, 32), "did you mean 'mobilenet_v"),
        ("torchvision:", (3, 32, 32), "no classifier ''"),
        ("torchvision:resnet18", (64,), "needs images"),
        ("torchvision:vit_b_16", (3, 33, 33), "cannot be made"),
    ],
)
def test_wrong_names_and_options(name: str, shape: Any, says: str) -> None:
    if name.startswith("torchvision"):
        pytest.importorskip("torchvision")
    with pytest.raises(UserError, match=says) as caught:
        build_model(name, shape, 10)
    assert "\n" not in str(caught.value)
