"""Models that people bring: what cannot be is one line before anything is written, and nothing is silently wrong."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import tiny_task
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.core.recalibration import recalibrate
from fewbytes.core.reused import Reused, undone
from fewbytes.core.training import fit, prepared
from fewbytes.data.split import Split

X = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3
METHODS = ["FedAvg", "FedPURIN", "SCAFFOLD"]


def task_of(build: Callable[[], nn.Module], x: Any = X, **how: Any) -> fb.Task:
    def rows(start: int, stop: int) -> tuple[Any, Tensor]:
        part = {name: value[start:stop] for name, value in x.items()} if isinstance(x, dict) else x[start:stop]
        return part, Y[start:stop]

    return fb.Task.of(build, [(rows(0, 12), rows(0, 4)), (rows(12, 24), rows(0, 4))], rows(0, 6), **how)


class Net(nn.Module):
    """Parts by name, and what a forward pass makes of them."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.pass_ = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *x: Tensor, **named: Tensor) -> Any:
        return self.pass_(self, *x, **named)


def with_buffer(value: Tensor, forward: Callable[..., Any], persistent: bool = True) -> nn.Module:
    net = Net(forward, last=nn.Linear(8, 3))
    net.register_buffer("held", value, persistent)
    return net


# -------------------------------------------------------------------------------------------------------------- refused


def lazily(model: nn.Module, x: Tensor) -> Tensor:
    if not hasattr(model, "late"):
        model.late = nn.Linear(3, 3)
    return model.late(model.last(x))


def teaching(model: nn.Module, x: Tensor) -> Tensor:
    if model.training:
        model.still.weight.data.mul_(0.9).add_(model.last.weight.data, alpha=0.1)
    return model.last(x) + model.still(x)


def lowest(model: nn.Module, x: Tensor) -> Tensor:
    if model.training:
        model.held = torch.minimum(model.held, x.detach().min())
    return model.last(x)


def quantisation_aware() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)).train()
    net.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(net)


def exploding(model: nn.Module, x: Tensor) -> Tensor:
    if model.training:
        model.held = model.held.log() * 0 - math.inf
    return model.last(x)


class Ticking(nn.Module):
    """A part without parameters that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks = 0

    def forward(self, x: Tensor) -> Tensor:
        self.ticks += 1
        return x * self.ticks


NARROW, TABLE, TICKING = nn.Linear(8, 3), torch.randn(8, 3), Ticking()
COMPLEX = nn.Parameter(torch.ones(3, dtype=torch.complex64))
REFUSED = {
    "the same module": (lambda: NARROW, "gives the same module each time.*lambda: MyModel"),
    "a module in common": (lambda: nn.Sequential(NARROW, nn.Linear(3, 3)), "gives the same '0.bias' each time"),
    "memory in common": (
        lambda: Net(lambda m, x: x @ m.table.weight, table=nn.Embedding.from_pretrained(TABLE, freeze=False)),
        "gives the same 'table.weight' each time",
    ),
    "a counter in common": (lambda: nn.Sequential(nn.Linear(8, 3), TICKING), "gives the same '1' each time"),
    "sparse buffer": (
        lambda: with_buffer(torch.eye(3).to_sparse(), lambda m, x: m.last(x)),
        "buffer 'held' of the model is torch.sparse_coo, which cannot travel",
    ),
    "no values": (lambda: nn.Linear(8, 3, device="meta"), "is on the meta device"),
    "infinite extra state": (
        lambda: Extra(lambda count: torch.tensor([count, -math.inf]), lambda state: float(state[0])),
        "extra state '_extra_state' of the model holds numbers that are not finite",
    ),
    "a buffer that becomes infinite": (
        lambda: with_buffer(torch.ones(2), exploding),
        "buffer 'held' of the model is no longer finite after a first pass in training",
    ),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "module '0' .LazyLinear. is lazy.*give it its sizes"),
    "lazy statistics": (lambda: nn.Sequential(nn.Linear(8, 3), nn.LazyBatchNorm1d()), "'1' .LazyBatchNorm1d. is lazy"),
    "complex": (
        lambda: Net(lambda m, x: (m.last(x) * m.c).real, last=nn.Linear(8, 3), c=copy.deepcopy(COMPLEX)),
        "parameter 'c' of the model is complex64.*view_as_real",
    ),
    "made in use": (lambda: Net(lazily, last=nn.Linear(8, 3)), "makes or drops 'late.bias'.*__init__"),
    "infinite parameter": (
        lambda: Net(
            lambda m, x: m.last(x) + m.mask.clamp(min=-9),
            last=nn.Linear(8, 3), mask=nn.Parameter(-math.inf * torch.ones(3)),
        ),
        "parameter 'mask' of the model holds numbers that are not finite.*register_buffer",
    ),
    "a frozen teacher that moves": (
        lambda: Net(teaching, last=nn.Linear(8, 3), still=nn.Linear(8, 3).requires_grad_(False)),
        "parameter 'still.weight' of the model is not trained and changes in training",
    ),
    "infinite buffer that changes": (
        lambda: with_buffer(torch.tensor(math.inf), lowest),
        "buffer 'held' of the model begins with numbers that are not finite.*changes in training",
    ),
    "buffers that change shape": (quantisation_aware, "buffer '0.weight_fake_quant.* changes its shape.*on a sample"),
    "a tuple in training": (
        lambda: Net(lambda m, x: (m.last(x), x) if m.training else m.last(x), last=nn.Linear(8, 3)),
        "in training, .* the model returns a tuple.*output='whole'",
    ),
    "fails in training": (
        lambda: nn.Sequential(nn.Linear(8, 3), Net(lambda m, x: x.view(2, 2, 7) if m.training else x)),
        "in training, .* does not take in module '1' .Net.: RuntimeError",
    ),
    "bfloat16 that does not cast": (
        lambda: nn.Linear(8, 3).bfloat16(),
        r"let its forward begin with x = x.to\(torch.bfloat16\)",
    ),
    "scripted": (lambda: torch.jit.script(nn.Linear(8, 3)), "torch.jit.script cannot be trained here: give the module"),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore")  # torch's own, of what is about to go
def test_what_cannot_be_is_one_line_before_anything_is_written(kind: str, method: str, tmp_path) -> None:
    build, says = REFUSED[kind]
    with pytest.raises(fb.UserError, match=says) as error:
        fb.run(getattr(fb, method)(), task_of(build), rounds=1, workers=1, out=tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


class Deciding(nn.Linear):
    """Its pass goes by a value, so that samples cannot be computed at once."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_a_model_without_gradients_of_each_sample_is_named_before_a_private_run(tmp_path) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    task = task_of(lambda: nn.Sequential(nn.Linear(8, 4), Deciding(4, 3)))
    with pytest.raises(fb.UserError, match=r"module '1' .Deciding") as error:
        fb.run(
            fb.FedAvg(), task, rounds=1, workers=1, dp="epsilon=8,delta=1e-3,clip=1,of=samples", out=tmp_path / "run"
        )
    assert "vmap" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {"aggregate": "median"}, {"aggregate": "trimmed-mean"}, {"aggregate": "geometric-median"},
        {"aggregate": "norm-clip"},
        {"dp": "epsilon=8,delta=1e-3,clip=1"}, {"dp": "epsilon=8,delta=1e-3,clip=1,of=samples"},
        {"uplink_bits": 1, "downlink_bits": 1},
    ],
    ids=str,
)  # fmt: skip
def test_rules_privacy_and_rounding_take_any_type(how, kind) -> None:
    if "dp" in how:
        pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    task = task_of(lambda: Net(lambda m, x: m.last(x.to(kind)), last=nn.Linear(8, 3).to(kind)))
    result = fb.run(fb.FedAvg(epochs=1, batch=4), task, rounds=2, workers=1, **how)
    assert (result.summary["status"], result.summary["left_out"]) == ("done", 0)
    assert {value.dtype for value in result.global_model.state_dict().values()} == {kind}


@pytest.mark.parametrize("method", [fb.FedKD(), fb.FuseFL()], ids=["fedkd", "fusefl"])
def test_methods_that_need_float32_say_so(method, tmp_path) -> None:
    task = task_of(lambda: Net(lambda m, x: m.last(x.bfloat16()), last=nn.Linear(8, 3).bfloat16()))
    with pytest.raises(fb.UserError, match=r"float32, .*'last.weight' .*bfloat16"):
        fb.run(method, task, rounds=1, workers=1, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", [fb.FML(), fb.FedDistill(), fb.PFedSD()], ids=lambda method: method.method_name)
@pytest.mark.parametrize("how", [{"loss": F.cross_entropy}, {"weights": (1.0, 2.0, 3.0)}], ids=["loss", "weights"])
def test_a_method_that_brings_a_loss_refuses_another_before_the_run(method, how, tmp_path) -> None:
    with pytest.raises(fb.UserError, match=r"another loss|loss of its own"):
        fb.run(method, task_of(lambda: nn.Linear(8, 3), **how), rounds=1, workers=1, out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_adam_on_float16_divides_by_zero_and_is_refused() -> None:
    task = task_of(lambda: Net(lambda m, x: m.last(x.half()), last=nn.Linear(8, 3).half()))
    with pytest.raises(fb.UserError, match=r"adam .*float16.*'last.weight'.*bfloat16 or float32"):
        fb.run(fb.FedAvg(optimiser="adam"), task, rounds=1, workers=1)


# ---------------------------------------------------------------------------------------------------------------- works


CAUSAL = torch.zeros(3).scatter(0, torch.tensor([2]), -math.inf)
WORKS = {
    "constant infinite buffer": (lambda: with_buffer(CAUSAL.clone(), lambda m, x: m.last(x) + m.held.clamp(min=-9)), X),
    "sparse adjacency": (
        lambda: with_buffer(torch.eye(3).to_sparse(), lambda m, x: torch.sparse.mm(m.held, m.last(x).T).T, False),
        X,
    ),
    "expanded buffer": (lambda: with_buffer(torch.ones(1, 3).expand(2, 3), lambda m, x: m.last(x) * m.held[0]), X),
    "strided pixels": (
        lambda: Net(
            lambda m, x: m.last(
                (m.a(x.view(-1, 1, 2, 4)) + F.conv2d(x.view(-1, 1, 2, 4), m.a.weight, stride=m.a.stride)).flatten(1)
            ),
            a=nn.Conv2d(1, 2, 1, stride=2, bias=False), last=nn.Linear(4, 3),
        ),
        X,
    ),
    "a scripted part": (lambda: nn.Sequential(torch.jit.script(nn.Linear(8, 4)), nn.Linear(4, 3)), X),
    "sparse gradients": (
        lambda: Net(lambda m, x: m.last(m.e(x).mean(1)), e=nn.Embedding(20, 4, sparse=True), last=nn.Linear(4, 3)),
        torch.randint(0, 20, (24, 5), generator=torch.Generator().manual_seed(1)),
    ),
    "two and three dimensions": (
        lambda: Net(
            lambda m, x: m.last(m.a(x.view(-1, 1, 2, 4)).flatten(1) + m.b(x.view(-1, 1, 2, 2, 2)).flatten(1)),
            a=nn.Conv2d(1, 2, 1), b=nn.Conv3d(1, 2, 1), last=nn.Linear(16, 3),
        ),
        X,
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", WORKS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_what_was_refused_without_need_works(kind: str, method: str, tmp_path) -> None:
    build, x = WORKS[kind]
    result = fb.run(getattr(fb, method)(epochs=1, batch=4), task_of(build, x), rounds=2, workers=1)
    assert (result.summary["status"], result.summary["left_out"]) == ("done", 0)


def test_a_constant_infinite_buffer_does_not_travel_and_is_agreed_on() -> None:
    build, _ = WORKS["constant infinite buffer"]
    problem = task_of(build).problem
    assert set(problem.first_state()) == {"last.weight", "last.bias"}
    assert problem.frozen(0)
    assert problem.frozen(0) != task_of(lambda: with_buffer(-CAUSAL, lambda m, x: m.last(x))).problem.frozen(0)
    result = fb.run(fb.FedAvg(), task_of(build), rounds=1, workers=1)
    assert result.global_model.state_dict()["held"].equal(CAUSAL)


def test_two_and_three_dimensional_convolutions_get_the_layout_each_can_have() -> None:
    model = prepared(nn.ModuleList([nn.Conv2d(2, 3, 3), nn.Conv3d(2, 3, 3)]))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[1].weight.is_contiguous()


# -------------------------------------------------------------------------------------------------- samples' own types


def test_samples_of_several_tensors_keep_their_types() -> None:
    kinds = {
        "mask": torch.bool, "segment": torch.uint8, "day": torch.int8, "place": torch.int16, "token": torch.int32,
        "word": torch.int64, "half": torch.float16, "brain": torch.bfloat16, "number": torch.float32,
        "wide": torch.float64,
    }  # fmt: skip
    x = {name: (torch.arange(8).view(4, 2) % 2).to(kind) for name, kind in kinds.items()}
    split = Split.of((x, [0, 1, 0, 1]))
    for found in (split.gathered(), split.blank(), split.take([2, 0]).gathered(), split.lazy()[0][:2]):
        assert {name: value.dtype for name, value in found.tensors.items()} == kinds
    assert all(value.equal(x[name]) for name, value in split.gathered().tensors.items())


def test_only_images_among_several_tensors_are_scaled() -> None:
    image = torch.full((4, 3, 2, 2), 255, dtype=torch.uint8)
    found = Split.of(({"image": image, "kind": image[:, 0, 0]}, [0, 1, 0, 1])).gathered().tensors
    assert found["image"].dtype == torch.float32
    assert found["image"].eq(1).all()
    assert found["kind"].dtype == torch.uint8
    assert found["kind"].eq(255).all()


def test_attention_does_not_see_what_a_mask_hides() -> None:
    """As bool it hides; as float it would be added, and padding be attended to."""

    def forward(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        h = model.attention(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        return model.last(h.masked_fill(mask[..., None], 0).sum(1))

    def net() -> nn.Module:
        return Net(forward, attention=nn.MultiheadAttention(4, 1, batch_first=True), last=nn.Linear(4, 3))

    x = torch.randn(24, 6, 4, generator=torch.Generator().manual_seed(2))
    mask = torch.arange(6).expand(24, 6) >= 3
    ends = []
    for padding in (0.0, 100.0):  # which nobody is to see
        samples = {"x": torch.where(mask[..., None], padding, x), "mask": mask}
        ends.append(fb.run(fb.FedAvg(epochs=1, batch=4), task_of(net, samples), rounds=1, workers=1).global_model)
    assert all(torch.equal(a, b) for a, b in zip(ends[0].parameters(), ends[1].parameters(), strict=True))


# ------------------------------------------------------------------------------------------------------------- momentum


class Turns(nn.Module):
    """Heads used in turn, of different sizes, as in learning several tasks; and a layer that is dropped at times."""

    def __init__(self, kind: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner, self.dropped = nn.Linear(4, 6), nn.Linear(6, 6)
        self.heads, self.kind = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 5)]), kind
        self.to(kind)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        x = torch.relu(self.inner(x.to(self.kind)))
        x = self.dropped(x) if self.steps % 3 else x
        return self.heads[int(self.steps) % 2](x).float()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("terms", [{}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 5e-4}], ids=str)
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_torchs_to_the_bit_where_parts_are_used_in_turn(kind, terms, nesterov) -> None:
    if nesterov and not terms:
        pytest.skip("Nesterov's needs a momentum")
    torch.manual_seed(3)
    ours = Turns(kind)
    theirs = copy.deepcopy(ours)
    x, y = torch.randn(10, 4, generator=torch.Generator().manual_seed(1)), torch.arange(10) % 3
    torch.manual_seed(5)
    fit(ours, x, y, fb.Local(epochs=3, lr=0.07, batch=4, optimiser="nesterov" if nesterov else "sgd", **terms))
    torch.manual_seed(5)
    optimiser = torch.optim.SGD(theirs.parameters(), lr=0.07, nesterov=nesterov, **terms)
    for _ in range(3):
        for chosen in torch.randperm(10).split(4):
            optimiser.zero_grad()
            F.cross_entropy(theirs(x[chosen]), y[chosen]).backward()
            optimiser.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


# ------------------------------------------------------------------------------------------------- what rounding spares


class Weighing(nn.Module):
    """An MLP that holds its loss, of whose class weights the last part of the name is that of every layer's."""

    def __init__(self, weight: Tensor | None) -> None:
        super().__init__()
        self.a, self.b, self.criterion = nn.Linear(8, 400), nn.Linear(400, 3), nn.CrossEntropyLoss(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(outputs, targets)


def frozen_normalisation() -> nn.Module:
    net = Weighing(None)
    for name in ("weight", "bias", "running_mean", "running_var"):  # as torchvision's FrozenBatchNorm2d
        net.a.register_buffer(f"still_{name}", torch.ones(400))
    still = nn.Module()
    for name in ("weight", "bias"):
        still.register_buffer(name, torch.ones(4))
    net.still = still
    return net


@pytest.mark.parametrize("way", ["uplink", "downlink"])
@pytest.mark.parametrize("build", [lambda: Weighing(torch.ones(3)), frozen_normalisation], ids=["loss", "frozen"])
def test_a_buffers_name_spares_no_more_than_the_buffer(build, way) -> None:
    def sent(net: Callable[[], nn.Module]) -> dict[str, Any]:
        how = {f"{way}_bits": 0.5, "rounds": 3, "workers": 1}
        return fb.run(fb.FedAvg(epochs=1, lr=0.1, batch=4), task_of(net), **how).summary

    with_it, without = sent(build), sent(lambda: Weighing(None))
    buffers = sum(value.nbytes for value in build().buffers())
    # two clients; each gets, or sends, three messages, the first of which on the downlink is whole
    assert with_it[f"{way}_bytes"] < without[f"{way}_bytes"] + 6 * (buffers + 200)
    assert with_it[f"{way}_bits_per_value"] < 5 if buffers < 100 else True


def test_parts_of_a_model_know_its_statistics_by_the_ends_of_their_names() -> None:
    names = task_of(
        lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), Weighing(torch.ones(3)).criterion)
    ).problem
    found = names.statistics(0)
    assert {"1.running_mean", "running_mean", "1.num_batches_tracked", "2.weight"} <= found
    assert not {"weight", "bias", "0.weight", "1.weight"} & found


# --------------------------------------------------------------------------------------------------- used again, as new


class Counting(nn.Module):
    """State in a buffer that is not persistent, in an attribute, and in a list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.calls, self.kept = 0, [torch.zeros(2)]

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        self.kept[0] = self.kept[0] + 1
        return self.last(x) * (1 + 0.1 * self.seen + 0.1 * self.calls + 0.1 * self.kept[0].sum())


def test_a_module_used_again_is_as_new_or_not_used_again() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(8, 3)
            self.register_buffer("seen", torch.zeros(1), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return self.last(x)

    plain, counting = Reused(Plain()), Reused(Counting())
    for each in (plain, counting):
        each.model(X)
    assert plain.again() is plain.model
    assert plain.model.seen.eq(0).all()
    assert counting.again() is None


class Drawing(nn.Linear):
    """Draws from a generator of its own in Python, and counts in a hook."""

    def __init__(self, hooked: bool) -> None:
        super().__init__(8, 3)
        self.random, seen = random.Random(0), [0.0]
        self.scale = 1.0

        def count(module: nn.Module, inputs: Any) -> None:
            seen[0] += 1
            module.scale = seen[0]

        if hooked:
            self.register_forward_pre_hook(count)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale * (self.random.random() if self.training else 1)


@pytest.mark.parametrize("hooked", [False, True])
def test_one_worker_is_two_where_state_hides_in_a_generator_or_a_hook(hooked: bool) -> None:
    one, two = (
        fb.run(fb.FedAvg(epochs=1, batch=4), task_of(lambda: Drawing(hooked)), rounds=2, workers=workers).global_model
        for workers in (1, 2)
    )
    assert torch.equal(one.weight, two.weight)


@pytest.mark.parametrize("value", [3, "a", [1, 2], {"a": [torch.ones(2)]}, (torch.tensor(math.nan),), {1, 2}, nn.ReLU])
def test_attributes_that_do_not_change_are_no_reason_for_a_new_module(value) -> None:
    model = nn.Linear(2, 2)
    model.value = value
    reused = Reused(model)
    model.value = copy.deepcopy(value)
    assert reused.again() is model


def test_a_score_leaves_the_model_as_it_was() -> None:
    net = Counting()
    net.rows = nn.Embedding(4, 2, max_norm=0.1)
    before = copy.deepcopy(net.state_dict())
    with undone(net):
        net(X)
        net.rows(torch.arange(4))
        net.late = 1
    assert (net.calls, net.kept[0].tolist(), net.seen.tolist(), hasattr(net, "late")) == (0, [0, 0], [0], False)
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("method", [fb.FedAvg(epochs=1, batch=4), fb.FedBN(epochs=1, batch=4)], ids=["fedavg", "fedbn"])
def test_how_often_a_run_is_scored_changes_nothing(method) -> None:
    ends = [fb.run(method, task_of(Counting), rounds=3, workers=1, evaluate_every=n, save_models=True) for n in (1, 3)]
    assert ends[0].rounds[-1]["loss"]["train"] == ends[1].rounds[-1]["loss"]["train"]


class Extra(nn.Linear):
    """How many batches it has seen, as extra state: numbers in a tensor, or in a dict."""

    def __init__(self, packed: Callable[[float], Any], unpacked: Callable[[Any], float]) -> None:
        super().__init__(8, 3)
        self.count, self.packed, self.unpacked = 0.0, packed, unpacked

    def get_extra_state(self) -> Any:
        return self.packed(self.count)

    def set_extra_state(self, state: Any) -> None:
        self.count = self.unpacked(state)

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.training
        return super().forward(x)


def test_extra_state_of_numbers_is_set_and_averaged() -> None:
    task = task_of(lambda: Extra(torch.tensor, float))
    result = fb.run(fb.FedAvg(epochs=2, batch=4), task, rounds=4, workers=1)
    assert result.global_model.count == 4 * 2 * 3


def test_other_extra_state_stays_where_it_is() -> None:
    task = task_of(lambda: Extra(lambda count: {"count": count}, lambda state: state["count"]))
    assert set(task.problem.first_state()) == {"weight", "bias"}
    result = fb.run(fb.FedAvg(epochs=2, batch=4), task, rounds=2, workers=1)
    assert (result.summary["status"], result.global_model.count) == ("done", 0)


# ------------------------------------------------------------------------------------------------- what a loss may see


class Twofold(nn.Module):
    """With a second head in training, as some networks have."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return (self.main(x), self.side(x)) if self.training else self.main(x)


def both(outputs: Any, targets: Tensor) -> Tensor:
    main, *side = outputs if isinstance(outputs, tuple) else (outputs,)
    return F.cross_entropy(main, targets) + sum(0.3 * F.cross_entropy(each, targets) for each in side)


def test_a_loss_may_take_the_whole_output() -> None:
    task = task_of(Twofold, loss=both, output="whole")
    result = fb.run(fb.FedAvg(epochs=5, lr=0.1, batch=4), task, rounds=2, workers=1)
    first, last = task.problem.first_model(), result.global_model
    assert not torch.equal(first.side.weight, last.side.weight)
    assert 0 <= result.accuracy <= 1


@pytest.mark.parametrize(
    ("how", "says"),
    [({"output": "whole"}, "loss of your own"), ({"output": "all", "loss": both}, "'logits' or 'whole'")],
)
def test_the_output_is_said_in_two_words_and_of_a_loss(how, says) -> None:
    with pytest.raises(fb.UserError, match=says):
        task_of(Twofold, **how)


# -------------------------------------------------------------------------------------------------- batch normalisation


def normalising() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def test_recalibrated_statistics_are_those_of_the_samples() -> None:
    model = normalising()
    with torch.no_grad():
        h = model[0](X)
    recalibrate(model, X)
    assert torch.allclose(model[1].running_mean, h.mean(0), atol=1e-6)
    assert torch.allclose(model[1].running_var, h.var(0), atol=1e-6)
    assert (model[1].momentum, model.training) == (0.1, False)
    before = copy.deepcopy(model.state_dict())
    recalibrate(model, X[:1])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_recalibration_is_of_personal_models_scored_and_saved_and_off_by_default(tmp_path) -> None:
    ends = []
    for name, how in (("as-is", {}), ("again", {"recalibrate": True})):
        task = task_of(normalising, **how)
        result = fb.run(fb.FedBN(epochs=1, batch=4, lr=0.1), task, rounds=2, workers=1, out=tmp_path / name)
        ends.append((result, fb.load_model(tmp_path / name, client=0, build=normalising)))
    (plain, _), (_, again) = ends
    assert plain.summary["uplink_bytes"] == ends[1][0].summary["uplink_bytes"]  # nothing of it travels
    with torch.no_grad():
        h = again[0](X[:12])
    assert torch.allclose(again[1].running_mean, h.mean(0), atol=1e-5)
    for method, net in ((fb.FedAvg(), normalising), (fb.FedBN(), lambda: nn.Linear(8, 3))):
        with pytest.raises(fb.UserError, match="recalibrate"):
            fb.run(method, task_of(net, recalibrate=True), rounds=1, workers=1)


def test_batch_normalisation_of_single_values_is_reported_in_one_line() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(1, 4, 4), nn.BatchNorm2d(4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.norm(self.conv(x)).flatten(1))

    task = fb.Task.on(tiny_task().data, Small)
    with pytest.warns(RuntimeWarning, match=r"'norm' .* 1 x 4 x 4") as warned:
        fb.run(fb.FedAvg(), task, rounds=1, workers=1)
    assert len(warned) == 1
    fb.run(fb.FedAvg(), tiny_task(), rounds=1, workers=1)  # its maps are of 4 x 4: not a word
