"""What fewbytes computes is, for models of every kind, what a plain federated loop in torch computes."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations, prune

import fewbytes as fb

ROUNDS, BATCH, RATE, MOMENTUM = 2, 4, 0.05, 0.9
SIZES = (8, 4, 16)
"""Of the clients' data, whole batches; no client, and no two, have half of them: a mean of flags is never a tie."""
TAU, BETA, CUTOFF = 0.5, 1, 1e-10
TOLERANCE = 1e-6

State = dict[str, Tensor]
Data = tuple[Any, Tensor]
Build = Callable[[], nn.Module]


# ------------------------------------------------------------------------------------------------------ the plain loop


def entries(model: nn.Module) -> State:
    """A copy of the tensors of the model's state; what has several names has the first."""
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            found.setdefault(id(value), (name, value.detach().clone()))
    return dict(found.values())


def loaded(build: Build, state: State) -> nn.Module:
    """A new model with these entries."""
    model = build()
    whole = model.state_dict()  # with the versions of its modules, which some ask for
    whole.update(state)
    model.load_state_dict(whole)
    return model


def batches(data: Data) -> Iterator[Data]:
    x, y = data
    for start in range(0, len(y), BATCH):
        rows = slice(start, start + BATCH)
        yield {name: value[rows] for name, value in x.items()} if isinstance(x, Mapping) else x[rows], y[rows]


def trained(build: Build, state: State, data: Data) -> nn.Module:
    """A new model with these entries after an epoch; its gradients are the last batch's."""
    model = loaded(build, state).train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            module.eval()  # statistics that do not travel stand still
    loss = getattr(model, "loss", F.cross_entropy)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE, MOMENTUM)
    for x, y in batches(data):
        sgd.zero_grad()
        outputs = model(**x) if isinstance(x, Mapping) else model(x)
        loss(getattr(outputs, "logits", outputs), y).backward()
        sgd.step()
    return model


def mean(states: Sequence[State], weights: Sequence[float]) -> State:
    """In float64, rounded once to each entry's type; of counters and flags the nearest."""
    means = {}
    for name, first in states[0].items():
        value = sum(state[name].double() * weight for state, weight in zip(states, weights, strict=True)) / sum(weights)
        means[name] = (value if first.is_floating_point() else value.round()).to(first.dtype)
    return means


def of_batch_norm(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name in module.state_dict()
    }


def fedavg(build: Build, clients: Sequence[Data]) -> dict[str, State]:
    theta = entries(build())
    for _ in range(ROUNDS):
        theta = mean([entries(trained(build, theta, data)) for data in clients], [len(y) for _, y in clients])
    return {"global": theta}


def fedbn(build: Build, clients: Sequence[Data]) -> dict[str, State]:
    """Batch normalisation stays with each client."""
    thetas = [entries(build()) for _ in clients]
    stays = of_batch_norm(build())
    for t in range(ROUNDS):
        if t:
            together = mean(thetas, [len(y) for _, y in clients])
            shared = {name: value for name, value in together.items() if name not in stays}
            thetas = [theta | shared for theta in thetas]
        thetas = [entries(trained(build, theta, data)) for theta, data in zip(thetas, clients, strict=True)]
    return {f"client-{i}": theta for i, theta in enumerate(thetas)}


def fedpurin(build: Build, clients: Sequence[Data]) -> dict[str, State]:
    """Algorithm 1: values are averaged that matter, among clients for whom the same matter. The models are those of
    the last training."""
    thetas, stays = [entries(build()) for _ in clients], of_batch_norm(build())
    after = thetas
    for t in range(1, ROUNDS + 1):
        masks: list[State] = []
        for i, data in enumerate(clients):
            model = trained(build, thetas[i], data)
            thetas[i] = entries(model)
            masks.append({k: critical(p) for k, p in model.named_parameters() if p.requires_grad and k not in stays})
        after = list(thetas)
        sent = [{k: theta[k] * m for k, m in mask.items()} for theta, mask in zip(thetas, masks, strict=True)]
        everywhere = mean(sent, [1.0] * len(sent))
        for i, (mask, near) in enumerate(zip(masks, neighbours(masks, t), strict=True)):
            there = thetas[i] if t > BETA else mean([sent[j] for j in near], [1.0] * len(near))
            thetas[i] = thetas[i] | {k: torch.where(m, there[k], everywhere[k]) for k, m in mask.items()}
    return {f"client-{i}": theta for i, theta in enumerate(after)}


def critical(parameter: nn.Parameter) -> Tensor:
    """Where the loss would move most if a value were zero."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
    score = (gradient * parameter.detach()).abs()
    count = int(TAU * score.numel())
    if not count:
        return torch.zeros_like(score, dtype=torch.bool)
    least = score.flatten().sort(descending=True).values[count - 1]
    if least <= CUTOFF and (score > CUTOFF).any():
        least = score[score > CUTOFF].min()
    return score >= least


def neighbours(masks: Sequence[State], t: int) -> list[list[int]]:
    """Of each client those whose masks overlap enough with its own, and itself."""
    flat = [torch.cat([m.flatten() for m in mask.values()]) for mask in masks]
    overlaps = {(i, j): overlap(flat[i], flat[j]) for i, j in itertools.permutations(range(len(flat)), 2)}
    average, highest = sum(overlaps.values()) / len(overlaps), max(overlaps.values())
    least = highest if t == BETA else average + t / BETA * (highest - average)
    return [[j for j in range(len(flat)) if j == i or overlaps[i, j] >= least] for i in range(len(flat))]


def overlap(mine: Tensor, other: Tensor) -> float:
    return 1 - int((mine ^ other).sum()) / (2 * int(mine.sum()))


LOCAL = {"epochs": 1, "lr": RATE, "batch": BATCH, "momentum": MOMENTUM, "order": "stored"}
METHODS = {
    "fedavg": (fb.FedAvg(**LOCAL), fedavg),
    "fedbn": (fb.FedBN(**LOCAL), fedbn),
    "fedpurin": (fb.FedPURIN(**LOCAL, tau=TAU, beta=BETA, cutoff=CUTOFF), fedpurin),
}


# ------------------------------------------------------------------------------------------------- samples, and models


def vectors(n: int) -> Tensor:
    return torch.randn(n, 6)


def tasks(n: int) -> Tensor:
    """The first number says whose turn it is, of the whole batch."""
    turn = torch.arange(n) // BATCH % 2
    return torch.cat([turn[:, None].float(), torch.randn(n, 5)], 1)


def signals(n: int) -> Tensor:
    return torch.randn(n, 4, 8)


def images(n: int) -> Tensor:
    return torch.randn(n, 2, 8, 8)


def photographs(n: int) -> Tensor:
    return torch.randn(n, 3, 32, 32)


def volumes(n: int) -> Tensor:
    return torch.randn(n, 2, 4, 4, 4)


def words(n: int) -> Tensor:
    return torch.randint(1, 20, (n, 6))


def sentences(n: int) -> State:
    """Words, and which of them are there."""
    return {"input_ids": words(n), "attention_mask": torch.arange(6) < torch.randint(2, 7, (n, 1))}


def counted_sentences(n: int) -> State:
    return {name: value.long() for name, value in sentences(n).items()}


class Of(nn.Module):
    """Parts, tensors among them as buffers, and what is made of them and the samples."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.made = forward

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return self.made(self, *inputs, **named)


class Flat(nn.Module):
    """The mean over all but samples and channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(2)


def layer(*layers: nn.Module, width: int = 4) -> nn.Module:
    """Layers that keep channels, before a last one."""
    return nn.Sequential(*layers, nn.Tanh(), Flat(), nn.Linear(width, 3))


def dense(*layers: nn.Module, width: int = 6) -> nn.Module:
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(width, 3))


def recurrent(cell: nn.Module, width: int = 5) -> nn.Module:
    return Of(lambda m, x: m.last(m.cell(x)[0][:, -1]), cell=cell, last=nn.Linear(width, 3))


def cells(cell: nn.Module) -> nn.Module:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = model.cell(step, state)
        return model.last(state[0] if isinstance(state, tuple) else state)

    return Of(forward, cell=cell, last=nn.Linear(5, 3))


def embedded(embedding: nn.Module) -> nn.Module:
    return Of(
        lambda m, x: m.last(m.embedding(x).reshape(len(x), -1, 5).mean(1)), embedding=embedding, last=nn.Linear(5, 3)
    )


class Buffers(nn.Module):
    """Statistics of every type."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("positive", torch.zeros(6, dtype=torch.int32))
        self.register_buffer("met", torch.zeros(6, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            now = x.mean(0)
            self.average.lerp_(now, 0.25)
            self.batches += 1
            self.positive += (now > 0).int()
            self.met |= now > 0.8
        return self.last(torch.where(self.met, x, x - self.average) / (1 + self.positive / (1 + self.batches)))


class NotKept(nn.Module):
    """A moving average that is not part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.register_buffer("average", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(x.mean(0), 0.25)
        return self.last(x - self.average)


class PlainTensor(nn.Module):
    """A moving average that is a mere attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.average = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = self.average.lerp(x.mean(0), 0.25)
        return self.last(x - self.average)


class Counter(nn.Module):
    """Counts batches, of evaluations too if `always`, by which its outputs change."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.always, self.batches = always, 0

    def forward(self, x: Tensor) -> Tensor:
        self.batches += self.training or self.always
        return self.last(x) * self.batches


class Noisy(nn.Module):
    """Draws noise from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.torch_drawn, self.python_drawn = torch.Generator().manual_seed(3), random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + torch.randn(x.shape, generator=self.torch_drawn) * self.python_drawn.random()
        return self.last(x)


class ExtraTensor(nn.Module):
    """An extra state that is a tensor: how many batches it has met."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.batches = torch.zeros(())

    def get_extra_state(self) -> Tensor:
        return self.batches

    def set_extra_state(self, state: Tensor) -> None:
        self.batches = state

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.batches = self.batches + 1
        return self.last(x) / (1 + self.batches)


class ExtraWords(nn.Module):
    """An extra state that is not a tensor, and so does not travel."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.met = {"batches": 0}

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.met)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.met = dict(state)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.met["batches"] += 1
        return self.last(x) / (1 + self.met["batches"])


class OwnLoss(nn.Module):
    """Brings its loss, of weighted classes."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 3)
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.criterion(outputs, targets)


class Experts(nn.Module):
    """Each sample goes to one expert, so that some have no gradient in some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.gate(x).softmax(1).max(1)
        outputs = x.new_zeros(len(x), 3)
        for i in chosen.unique().tolist():
            outputs = outputs.index_copy(0, (rows := (chosen == i).nonzero()[:, 0]), self.experts[i](x[rows]))
        return outputs * share[:, None]


class LayerDrop(nn.Module):
    """Leaves a layer out of some batches, by a counter that travels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(6, 6) for _ in range(2)), nn.Linear(6, 3)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        dropped = None
        if self.training:
            dropped = random.Random(int(self.batches)).choice([None, 0, 1])
            self.batches += 1
        for i, each in enumerate(self.layers):
            x = x if i == dropped else each(x).tanh()
        return self.last(x)


def tied() -> nn.Module:
    model = dense(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model


def tied_embedding() -> nn.Module:
    model = Of(
        lambda m, x: m.last(m.back(m.embedding(x).mean(1))),
        embedding=nn.Embedding(20, 5), back=nn.Linear(5, 20), last=nn.Linear(20, 3),
    )  # fmt: skip
    model.back.weight = model.embedding.weight
    return model


def used_twice() -> nn.Module:
    layer, norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)
    return dense(layer, norm, nn.Tanh(), layer, norm)


def pruned() -> nn.Module:
    model = dense(nn.Linear(6, 6))
    prune.l1_unstructured(model[0], "weight", 0.3)
    return model


def frozen_layer() -> nn.Module:
    model = dense(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def frozen_batch_norm() -> nn.Module:
    model = dense(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    return model


def torchvision_frozen_batch_norm() -> nn.Module:
    ops = pytest.importorskip("torchvision.ops")
    return layer(nn.Conv2d(2, 4, 3), ops.FrozenBatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3))


def causal() -> nn.Module:
    return Of(
        lambda m, x: m.last(m.attention(x, x, x, attn_mask=m.mask, need_weights=False)[0].mean(1)),
        attention=nn.MultiheadAttention(8, 2, batch_first=True), last=nn.Linear(8, 3),
        mask=torch.full((4, 4), -torch.inf).triu(1),
    )  # fmt: skip


def gain(dtype: torch.dtype) -> nn.Module:
    return Of(
        lambda m, x: m.last(m.first(x).tanh() * m.gain.float()),
        first=nn.Linear(6, 6), last=nn.Linear(6, 3), gain=nn.Parameter(torch.rand(6).to(dtype)),
    )  # fmt: skip


def cast(inner: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A model of another type, of which samples are made there."""
    return Of(lambda m, x: m.inner(x.to(dtype)), inner=inner.to(dtype))


def normed(dtype: torch.dtype) -> nn.Module:
    return cast(dense(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)), dtype)


def scalar() -> nn.Module:
    return Of(
        lambda m, x: m.last(x) * (1 + m.scale) + m.shift,
        last=nn.Linear(6, 3), scale=nn.Parameter(torch.tensor(0.5)), shift=nn.Parameter(torch.ones(1)),
    )  # fmt: skip


def empty() -> nn.Module:
    return Of(lambda m, x: m.last(x) + m.nothing.sum(), last=nn.Linear(6, 3), nothing=nn.Parameter(torch.zeros(0, 3)))


def listed_parameters() -> nn.Module:
    return Of(
        lambda m, x: (x @ m.matrices[0]).tanh() @ m.matrices[1] + m.named["shift"],
        matrices=nn.ParameterList([torch.randn(6, 4), torch.randn(4, 3)]),
        named=nn.ParameterDict({"shift": torch.randn(3), "unused": torch.randn(2)}),
    )


def heads() -> nn.Module:
    return Of(
        lambda m, x: m.heads[int(x[0, 0])](m.trunk(x).tanh()),
        trunk=nn.Linear(6, 6), heads=nn.ModuleList(nn.Linear(6, 3) for _ in range(2)),
    )  # fmt: skip


def flat_and_solid() -> nn.Module:
    return Of(
        lambda m, x: m.last(torch.cat([m.flat(x[..., 0]).flatten(2).mean(2), m.solid(x).flatten(2).mean(2)], 1)),
        flat=nn.Conv2d(2, 4, 3), solid=nn.Conv3d(2, 4, 3), last=nn.Linear(8, 3),
    )  # fmt: skip


def bilinear() -> nn.Module:
    return Of(lambda m, x: m.last(m.both(x[:, :4], x[:, 4:])), both=nn.Bilinear(4, 2, 5), last=nn.Linear(5, 3))


def attention() -> nn.Module:
    return Of(
        lambda m, x: m.last(m.attention(x, x, x)[0].mean(1)),
        attention=nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True), last=nn.Linear(8, 3),
    )  # fmt: skip


def attending(**how: Any) -> dict[str, Any]:
    return {"nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True} | how


def encoder() -> nn.Module:
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, **attending()), 2, enable_nested_tensor=False)
    return Of(lambda m, x: m.last(m.stack(x).mean(1)), stack=stack, last=nn.Linear(8, 3))


def decoder() -> nn.Module:
    each = nn.TransformerDecoderLayer(8, **attending(norm_first=True))
    return Of(lambda m, x: m.last(m.each(x, x.flip(1)).mean(1)), each=each, last=nn.Linear(8, 3))


def transformer() -> nn.Module:
    whole = nn.Transformer(8, num_encoder_layers=1, num_decoder_layers=1, **attending())
    return Of(lambda m, x: m.last(m.whole(x, x).mean(1)), whole=whole, last=nn.Linear(8, 3))


def adaptive_softmax() -> nn.Module:
    return Of(
        lambda m, x: m.last.log_prob(m.first(x)),
        first=nn.Linear(6, 6), last=nn.AdaptiveLogSoftmaxWithLoss(6, 3, cutoffs=[1], div_value=1.5),
    )  # fmt: skip


def masked_words() -> nn.Module:
    """Takes a mask as what it is, of bool."""

    def forward(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return model.last(model.embedding(input_ids).masked_fill(~attention_mask[..., None], 0.5).mean(1))

    return Of(forward, embedding=nn.Embedding(20, 5), last=nn.Linear(5, 3))


def tamed(model: nn.Module) -> nn.Module:
    """In float64, without dropout, and with batch normalisation that divides by no small number.

    Else gradients of so deep a model explode, of a few small images, until the order of sums shows in every value.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        if isinstance(module, _BatchNorm):
            module.eps = 0.2
    return cast(model, torch.float64)


def torchvision_model(name: str, **how: Any) -> nn.Module:
    return tamed(pytest.importorskip("torchvision.models").get_model(name, weights=None, num_classes=3, **how))


def resnet18() -> nn.Module:
    """Without the last stage, which is three quarters of it."""
    model = pytest.importorskip("torchvision.models").resnet18(weights=None)
    model.layer4, model.fc = nn.Identity(), nn.Linear(256, 3)
    return tamed(model)


def squeezenet() -> nn.Module:
    """Begins with logits above 0, below which it has no gradient."""
    model = pytest.importorskip("torchvision.models").squeezenet1_1(weights=None, num_classes=3)
    nn.init.ones_(model.classifier[1].bias)
    return tamed(model)


def densenet() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    return tamed(models.DenseNet(8, (2, 2, 2), num_init_features=16, num_classes=3))


def efficientnet() -> nn.Module:
    made = pytest.importorskip("torchvision.models.efficientnet")
    blocks = [made.MBConvConfig(1, 3, 1, 16, 8, 1), made.FusedMBConvConfig(4, 3, 2, 8, 16, 2)]
    return tamed(made.EfficientNet([*blocks, made.MBConvConfig(4, 5, 2, 16, 24, 2)], dropout=0.0, num_classes=3))


def regnet() -> nn.Module:
    made = pytest.importorskip("torchvision.models.regnet")
    blocks = made.BlockParams.from_init_params(depth=5, w_0=16, w_a=10.0, w_m=2.0, group_width=8, se_ratio=0.25)
    return tamed(made.RegNet(blocks, num_classes=3))


def vision_transformer() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    return models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=3
    )


def transformers() -> ModuleType:
    return pytest.importorskip("transformers")


NARROW = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "num_labels": 3}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert() -> nn.Module:
    config = transformers().BertConfig(vocab_size=20, max_position_embeddings=8, **NARROW, **UNDROPPED)
    return transformers().BertForSequenceClassification(config)


def distilbert() -> nn.Module:
    config = transformers().DistilBertConfig(
        vocab_size=20, max_position_embeddings=8, dim=8, n_layers=1, n_heads=2, hidden_dim=16, num_labels=3,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    return transformers().DistilBertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = transformers().GPT2Config(
        vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, num_labels=3,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers().GPT2ForSequenceClassification(config)


def transformers_vit() -> nn.Module:
    config = transformers().ViTConfig(image_size=8, patch_size=4, num_channels=2, **NARROW, **UNDROPPED)
    return transformers().ViTForImageClassification(config)


def adapted(make: Build, kind: str, **how: Any) -> nn.Module:
    """A model with adapters, which alone are trained, and the last layer."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(make(), getattr(peft, kind)(**how))


def adapted_layers() -> nn.Module:
    return adapted(lambda: dense(nn.Linear(6, 6)), "LoraConfig", r=2, target_modules=["0"], modules_to_save=["2"])


BERT_LORA = partial(adapted, bert, "LoraConfig", task_type="SEQ_CLS", r=2, target_modules=["query", "value"])


@dataclass(frozen=True)
class Case:
    """A model and its samples, the methods it is run with, numbers of samples by client, whether bytes are coded."""

    make: Build
    samples: Callable[[int], Any] = vectors
    methods: tuple[str, ...] = tuple(METHODS)
    sizes: tuple[int, ...] = SIZES
    coded: bool = True


def large(make: Build | str, **how: Any) -> Case:
    """What takes long: one method, two clients."""
    build = partial(torchvision_model, make, **how) if isinstance(make, str) else make
    return Case(build, photographs, ("fedavg",), (4, 8), coded=False)


MEANS = ("fedavg", "fedbn")
"""For weight norm, which divides by the length of a row: FedPURIN may make a whole row zero."""
CASES = {
    # entries of every kind
    "buffers": Case(Buffers),
    "buffer of -inf": Case(causal, signals),
    "buffer that is not kept": Case(NotKept),
    "attribute that is a tensor": Case(PlainTensor),
    "attribute that counts training": Case(partial(Counter, always=False)),
    "attribute that counts": Case(partial(Counter, always=True)),
    "generators of its own": Case(Noisy),
    "extra state, a tensor": Case(ExtraTensor),
    "extra state, words": Case(ExtraWords),
    "tied layers": Case(tied),
    "tied embedding": Case(tied_embedding, words),
    "layers used twice": Case(used_twice),
    "pruned": Case(pruned),
    "weight norm": Case(lambda: dense(parametrizations.weight_norm(nn.Linear(6, 6))), methods=MEANS),
    "weight norm of old": Case(lambda: dense(nn.utils.weight_norm(nn.Linear(6, 6))), methods=MEANS),
    "spectral norm": Case(lambda: dense(parametrizations.spectral_norm(nn.Linear(6, 6)))),
    "spectral norm of old": Case(lambda: dense(nn.utils.spectral_norm(nn.Linear(6, 6)))),
    "orthogonal": Case(lambda: dense(parametrizations.orthogonal(nn.Linear(6, 6)))),
    "frozen layer": Case(frozen_layer),
    "frozen batch norm": Case(frozen_batch_norm),
    "torchvision's frozen batch norm": Case(torchvision_frozen_batch_norm, images),
    "scalar": Case(scalar),
    "empty": Case(empty),
    "lists of parameters": Case(listed_parameters),
    "float16 gain": Case(partial(gain, torch.float16)),
    "bfloat16 gain": Case(partial(gain, torch.bfloat16)),
    "bfloat16": Case(partial(normed, torch.bfloat16)),
    "float64": Case(partial(normed, torch.float64)),
    "loss of its own": Case(OwnLoss),
    "mask of bool": Case(masked_words, sentences),
    # layers of torch.nn
    "Linear": Case(lambda: dense(nn.Linear(6, 6))),
    "Bilinear": Case(bilinear),
    "Conv1d": Case(lambda: layer(nn.Conv1d(4, 4, 3)), signals),
    "Conv2d": Case(lambda: layer(nn.Conv2d(2, 4, 3, stride=2)), images),
    "Conv2d 1x1": Case(lambda: layer(nn.Conv2d(2, 4, 1, stride=2)), images),
    "Conv2d in groups": Case(lambda: layer(nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 4, 3, dilation=2)), images),
    "Conv3d": Case(lambda: layer(nn.Conv3d(2, 4, 2)), volumes),
    "Conv2d beside Conv3d": Case(flat_and_solid, volumes),
    "ConvTranspose1d": Case(lambda: layer(nn.ConvTranspose1d(4, 4, 3)), signals),
    "ConvTranspose2d": Case(lambda: layer(nn.ConvTranspose2d(2, 4, 3, stride=2)), images),
    "ConvTranspose3d": Case(lambda: layer(nn.ConvTranspose3d(2, 4, 2)), volumes),
    "BatchNorm1d": Case(lambda: dense(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6))),
    "BatchNorm1d, momentum None": Case(lambda: dense(nn.BatchNorm1d(6, momentum=None))),
    "BatchNorm1d, not affine": Case(lambda: dense(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 6))),
    "BatchNorm1d, not tracking": Case(lambda: dense(nn.BatchNorm1d(6, track_running_stats=False))),
    "BatchNorm2d": Case(lambda: layer(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)), images),
    "BatchNorm3d": Case(lambda: layer(nn.Conv3d(2, 4, 2, bias=False), nn.BatchNorm3d(4)), volumes),
    "InstanceNorm1d": Case(lambda: layer(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)), signals),
    "InstanceNorm2d": Case(
        lambda: layer(nn.Conv2d(2, 4, 3, bias=False), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        images,
    ),
    "InstanceNorm3d": Case(
        lambda: layer(nn.InstanceNorm3d(2, affine=True, track_running_stats=True), nn.Conv3d(2, 4, 2)), volumes
    ),
    "LayerNorm": Case(lambda: dense(nn.LayerNorm(6))),
    "GroupNorm": Case(lambda: layer(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4)), images),
    "RMSNorm": Case(lambda: dense(nn.RMSNorm(6))),
    "LocalResponseNorm": Case(lambda: layer(nn.Conv2d(2, 4, 3), nn.LocalResponseNorm(2), nn.Conv2d(4, 4, 3)), images),
    "PReLU": Case(lambda: layer(nn.Conv1d(4, 4, 3), nn.PReLU(4), nn.Conv1d(4, 4, 3), nn.PReLU()), signals),
    "Embedding": Case(lambda: embedded(nn.Embedding(20, 5, padding_idx=3)), words),
    "Embedding, max_norm": Case(lambda: embedded(nn.Embedding(20, 5, max_norm=1.0)), words),
    "Embedding, sparse": Case(lambda: embedded(nn.Embedding(20, 5, sparse=True)), words),
    "EmbeddingBag": Case(lambda: embedded(nn.EmbeddingBag(20, 5)), words),
    "RNN": Case(lambda: recurrent(nn.RNN(8, 5, batch_first=True)), signals),
    "GRU": Case(lambda: recurrent(nn.GRU(8, 5, batch_first=True)), signals),
    "LSTM": Case(
        lambda: recurrent(nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True, proj_size=3), width=6), signals
    ),
    "RNNCell": Case(lambda: cells(nn.RNNCell(8, 5)), signals),
    "GRUCell": Case(lambda: cells(nn.GRUCell(8, 5)), signals),
    "LSTMCell": Case(lambda: cells(nn.LSTMCell(8, 5)), signals),
    "MultiheadAttention": Case(attention, signals),
    "TransformerEncoder": Case(encoder, signals),
    "TransformerDecoderLayer": Case(decoder, signals),
    "Transformer": Case(transformer, signals),
    "AdaptiveLogSoftmaxWithLoss": Case(adaptive_softmax),
    # parts used in turn
    "heads in turn": Case(heads, tasks),
    "experts": Case(Experts),
    "layer drop": Case(LayerDrop),
    # torchvision
    "resnet18": large(resnet18),
    "mobilenet_v2": large("mobilenet_v2", width_mult=0.35),
    "mobilenet_v3_small": large("mobilenet_v3_small", width_mult=0.5),
    "shufflenet_v2_x0_5": large("shufflenet_v2_x0_5"),
    "squeezenet1_1": large(squeezenet),
    "DenseNet": large(densenet),
    "EfficientNet": large(efficientnet),
    "RegNet": large(regnet),
    "VisionTransformer": Case(vision_transformer, photographs),
    # transformers, and adapters
    "Bert": Case(bert, sentences),
    "Bert, mask of integers": Case(bert, counted_sentences, ("fedavg",)),
    # the gradient of its keys' biases is 0 but for rounding, by which FedPURIN would choose what matters
    "DistilBert": Case(distilbert, sentences, ("fedavg", "fedbn")),
    "GPT2": Case(gpt2, counted_sentences),
    "ViT": Case(transformers_vit, images, ("fedavg", "fedbn")),  # as DistilBert, on some processors
    "LoRA": Case(BERT_LORA, counted_sentences),
    "LoRA of layers": Case(adapted_layers),
    "DoRA": Case(partial(BERT_LORA, use_dora=True), counted_sentences),
    "IA3": Case(
        partial(
            adapted, bert, "IA3Config", task_type="SEQ_CLS",
            target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"],
        ),
        counted_sentences,
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the two alike


def alike(make: Build) -> Build:
    """Makes a model of the same first weights each time, whatever is drawn elsewhere."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
            torch.manual_seed(1)
            return make()

    return build


def data_of(case: Case) -> list[Data]:
    """Of each client, and some to test with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return [(case.samples(n), torch.randint(3, (n,))) for n in (*case.sizes, BATCH)]


def apart(actual: Tensor, expected: Tensor) -> Tensor:
    """Where two tensors differ by more than the order of sums can explain."""
    if expected.dtype in (torch.float16, torch.bfloat16):
        units = actual.view(torch.int16).int() - expected.view(torch.int16).int()
        return (units.abs() > 1) & (actual != expected)
    difference = (actual.double() - expected.double()).abs()
    near = difference <= TOLERANCE * expected.double().abs().clamp(min=1)
    return ~near & (actual != expected)


@pytest.mark.filterwarnings("ignore:batch normalisation .* sees a single value")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(name, method, id=f"{name}-{method}") for name, case in CASES.items() for method in case.methods],
)
def test_a_run_computes_what_a_plain_loop_does(name, method, tmp_path):
    case = CASES[name]
    build, (ours, plain) = alike(case.make), METHODS[method]
    *clients, test = data_of(case)
    task = fb.Task.of(build, [(train, test) for train in clients], test)
    fb.run(ours, task, rounds=ROUNDS, out=tmp_path / "run", workers=1, coded=case.coded)
    for model, theta in plain(build, clients).items():
        actual = load_file(tmp_path / "run" / "models" / f"{model}.safetensors")
        state = loaded(build, theta).state_dict()
        expected = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        kinds = [{key: (v.dtype, v.shape) for key, v in values.items()} for values in (actual, expected)]
        assert kinds[0] == kinds[1]
        wrong = [key for key, value in expected.items() if apart(actual[key], value).any()]
        by = {key: float((actual[key].double() - expected[key].double()).abs().max()) for key in wrong}
        assert not by, (
            f"{model}: {len(by)} of {len(expected)} entries differ, {max(by, key=by.get)} by {max(by.values())}"
        )


@pytest.mark.parametrize("name", ["frozen layer", "LoRA", "LoRA of layers", "DoRA", "IA3"])
def test_only_what_is_trained_travels(name):
    case = CASES[name]
    build = alike(case.make)
    task = fb.Task.of(build, [(train, train) for train in data_of(case)])
    assert list(task.problem.first_state()) == [key for key, p in build().named_parameters() if p.requires_grad]
