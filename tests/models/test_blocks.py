"""Cutting models into blocks: units in order are the model, cuts are where the papers put them, errors are plain."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fewbytes.base.errors import UserError
from fewbytes.models import build_model
from fewbytes.models.blocks import classifier_of, cut, features_of, head_of, shapes, units_of

MODELS = [
    ("resnet18:width=4", (3, 16, 16)), ("resnet8:width=4", (1, 28, 28)), ("resnet50:width=2", (3, 16, 16)),
    ("vgg9:scale=0.1", (3, 32, 32)), ("cnn4", (1, 28, 28)), ("mlp:layers=3,hidden=8", (5,)),
    ("resnet8:width=4@6", (1, 28, 28)), ("mlp:layers=3,hidden=8@12", (5,)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), MODELS)
def test_units_and_classifier_in_order_are_the_model(name, shape):
    torch.manual_seed(0)
    model = build_model(name, shape, 7).eval()
    x = torch.rand(3, *shape)
    out = x
    for unit in units_of(model).values():
        out = unit(out)
    assert torch.equal(classifier_of(model)(out), model(x))


@pytest.mark.parametrize(("name", "shape"), MODELS)
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_blocks_and_classifier_hold_every_entry_once_by_the_models_names(name, shape, blocks):
    model = build_model(name, shape, 7)
    parts = cut(model, blocks)
    names = [n for part in parts for n in part.state()] + ["fc.weight", "fc.bias"]
    assert sorted(names) == sorted(model.state_dict())
    assert len(parts) == blocks
    assert {n: v.shape for part in parts for n, v in part.state().items()}.items() <= {
        n: v.shape for n, v in model.state_dict().items()
    }.items()


@pytest.mark.parametrize(
    ("blocks", "sizes"),
    [(2, [5, 5]), (3, [1, 4, 5]), (4, [1, 4, 2, 3]), (8, [1, 1, 1, 1, 2, 2, 1, 1])],
)
def test_resnet18_is_cut_as_fusefl_does(blocks, sizes):
    model = build_model("resnet18:width=2", (3, 32, 32), 10)
    assert [len(part.units) for part in cut(model, blocks)] == sizes


@pytest.mark.parametrize(("depth", "last"), [(10, [0, 2, 3, 5]), (18, [0, 4, 6, 9]), (26, [0, 6, 9, 13])])
def test_resnets_of_any_depth_are_cut_at_the_ends_of_stages_where_shapes_agree(depth, last):
    parts = cut(build_model(f"resnet{depth}:width=2,stem=3x3", (3, 32, 32), 10), 4)
    ends = torch.tensor([len(part.units) for part in parts]).cumsum(0) - 1
    assert ends.tolist() == last
    assert shapes(parts, (3, 32, 32)) == [(2, 32, 32), (4, 16, 16), (8, 8, 8), (16,)]


def test_a_cut_by_a_stages_name_fits_every_depth():
    for depth in (10, 18, 26):
        model = build_model(f"resnet{depth}:width=2,stem=3x3", (3, 32, 32), 10)
        named = cut(model, 0, ("stem", "layers.1", "layers.2"))
        assert [list(p.state()) for p in named] == [list(p.state()) for p in cut(model, 4)]


def test_vgg9_is_fedmas_and_scales_as_fusefl_needs():
    model = build_model("vgg9", (3, 32, 32), 10)
    assert sum(p.numel() for p in model.parameters()) == 3_491_530
    scaled = build_model("vgg9:scale=0.447", (3, 32, 32), 10)
    assert [p.shape[0] for n, p in scaled.named_parameters() if n.endswith("weight")] == [
        14, 29, 57, 57, 114, 114, 229, 229, 10,
    ]  # fmt: skip
    assert [next(iter(part.state())) for part in cut(scaled, 4)] == [
        "conv1.weight", "conv3.weight", "conv5.weight", "fc1.weight",
    ]  # fmt: skip


def test_vgg9_drops_features_only_in_training():
    model = build_model("vgg9:scale=0.2", (3, 8, 8), 3)
    x = torch.rand(4, 3, 8, 8)
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


def test_a_dry_run_leaves_the_mode_and_the_statistics_alone():
    model = build_model("resnet10:width=2", (3, 16, 16), 10).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    shapes(cut(model, 4), (3, 16, 16))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


class Own(nn.Module):
    """A user's module that lists its units."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.b(self.a(x).relu()).relu())

    @property
    def classifier(self):
        return self.head

    def units(self):
        return {"a": nn.Sequential(self.a, nn.ReLU()), "b": nn.Sequential(self.b, nn.ReLU())}


def test_a_users_module_and_a_plain_sequential_can_be_cut():
    parts = cut(Own(), 2)
    assert [list(part.state()) for part in parts] == [["a.weight", "a.bias"], ["b.weight", "b.bias"]]
    plain = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    parts = cut(plain, 0, ("1",))
    assert [list(part.state()) for part in parts] == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert classifier_of(plain) is plain[-1]


@pytest.mark.parametrize(
    ("model", "blocks", "after", "said"),
    [
        (nn.Conv2d(1, 1, 1), 2, (), "Conv2d .*units"),
        (Own(), 3, (), "units a, b .*3 blocks"),
        (Own(), 0, ("c",), "no unit 'c'"),
        (Own(), 0, ("b",), "cuts b .*without the last, of a, b"),
        (Own(), 0, ("a", "a"), "different units"),
    ],
)
def test_what_cannot_be_cut_is_told_in_one_line(model, blocks, after, said):
    with pytest.raises(UserError, match=said) as caught:
        cut(model, blocks, after)
    assert "\n" not in str(caught.value)


def test_features_are_flat_and_share_the_models_parameters():
    plain = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Linear(2, 5))  # a classifier along the width
    block = features_of(plain)
    assert block(torch.rand(3, 3, 6, 4)).shape == (3, 16)
    assert shapes([block], (3, 6, 4)) == [(16,)]
    assert block.units[0] is plain[0]
    assert list(block.state()) == ["0.weight", "0.bias"]
    own = Own()
    assert list(features_of(own).state()) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert head_of(own) is own.head


class Assigned(nn.Module):
    """A splittable module whose classifier is a layer of that name, not a property."""

    def __init__(self):
        super().__init__()
        self.body, self.classifier = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.classifier(self.body(x))

    def units(self):
        return {"body": self.body}


def test_the_classifier_may_be_a_layer_of_that_name():
    model = Assigned()
    assert classifier_of(model) is model.classifier
    x = torch.rand(2, 4)
    assert torch.equal(head_of(model)(features_of(model)(x)), model(x))


@pytest.mark.parametrize(
    "model", [nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2), nn.ReLU())]
)
def test_a_model_without_features_is_told_what_it_lacks(model):
    with pytest.raises(UserError, match=r"no features: .*units\(\).*@512$") as caught:
        features_of(model)
    assert "\n" not in str(caught.value)
