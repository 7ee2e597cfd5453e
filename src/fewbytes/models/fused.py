"""FuseFL's networks: fused blocks, a client's training stage, and the whole fused network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse
from torch.fx.proxy import TraceError

from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.state import State, load_state
from fewbytes.models.blocks import classifier_of, cut, linear_of, shapes

AdaptorKind = Literal["conv", "average"]
Reduce = Literal["sum", "mean", "concatenate"]


class Gather(nn.Module):
    """A block's input from all branches of the block before: their concatenation, or their mean (Eq. 7).

    `takes` is the block's input shape. Features (n, c, h, w) are resized to its height and width, by average pooling if
    neither side is smaller, else by bilinear interpolation. Features (n, d) and (n, tokens, d) are concatenated along
    d. Raises UserError for features that cannot be gathered.
    """

    def __init__(self, kind: AdaptorKind, takes: tuple[int, ...]) -> None:
        super().__init__()
        self.kind, self.takes = kind, takes

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Features of each branch, (n, …), to the input of an adaptor or, if averaged, of a block."""
        image = len(self.takes) == 3
        sizes = [tuple(u.shape[1:]) for u in features]
        free = 0 if self.kind == "average" else len(sizes[0]) if image else 1  # how many last dimensions may differ
        fixed = {(len(size), size[: len(size) - free]) for size in sizes}
        if len(fixed) > 1 or (image and features[0].dim() != 4):
            raise UserError(f"adaptor={self.kind} cannot join features of shapes {sizes}: cut the models elsewhere")
        if self.kind == "average":
            return sum(features[1:], features[0]) / len(features)
        if image:
            return torch.cat([_resized(u, self.takes[1:]) for u in features], dim=1)
        return torch.cat(list(features), dim=-1)


class Branch(nn.Module):
    """One client's branch of a fused block: its adaptor's weights, if any, and its block (A_m^k and H_m^k)."""

    def __init__(self, adaptor: nn.Module | None, block: nn.Module, takes: tuple[int, ...]) -> None:
        super().__init__()
        self.adaptor = nn.Identity() if adaptor is None else adaptor
        self.block, self.takes = block, takes

    def forward(self, gathered: Tensor) -> Tensor:
        """Gathered features (n, …) to this client's (n, …)."""
        out: Tensor = self.block(self.adaptor(gathered))
        return out


class FusedBlock(nn.Module):
    """H_fus^k: the branches in client order. Each takes all branches of the block before; in the first, the sample."""

    branches: Sequence[Branch]

    def __init__(self, branches: Sequence[Branch], kind: AdaptorKind | None) -> None:
        super().__init__()
        self.branches, self.kind = _listed(branches), kind

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Features of each branch of the block before, or [samples] (n, …), to features of this block's branches."""
        if self.kind is None:
            return [branch(features[0].clone()) for branch in self.branches]  # a block may change its input
        gathered: dict[Any, Tensor] = {}  # shared by branches with the same input size
        outputs = []
        for branch in self.branches:
            size = branch.takes[1:]
            if size not in gathered:
                gathered[size] = Gather(self.kind, branch.takes)(features)
            fed = gathered[size].clone() if self.kind == "average" else gathered[size]  # a block may change its input
            outputs.append(branch(fed))
        return outputs


class Prefix(nn.Module):
    """Frozen fused blocks and the gathering for the next block: samples (n, …) to gathered features (n, …)."""

    blocks: Sequence[FusedBlock]

    def __init__(self, blocks: Sequence[FusedBlock], gather: Gather) -> None:
        super().__init__()
        self.blocks, self.gather = _listed(blocks), gather
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, …) to gathered features (n, …)."""
        features = [x]
        for block in self.blocks:
            features = block(features)
        gathered: Tensor = self.gather(features)
        return gathered

    def folded(self) -> Prefix:
        """A copy in eval mode with batch normalisation folded into convolutions where possible, which is cheaper."""
        blocks = [
            FusedBlock([Branch(b.adaptor, _folded(b.block), b.takes) for b in block.branches], block.kind)
            for block in self.blocks
        ]
        return Prefix(blocks, self.gather).eval()


class Stage(nn.Module):
    """F^{k,m}: a frozen prefix, and client m's trained part after it (its adaptor, blocks from k on, and classifier).

    `moving`: in training mode the prefix normalises by batch and updates its statistics, as the released code does.
    """

    def __init__(self, prefix: nn.Module, trained: nn.Module, moving: bool = False) -> None:
        super().__init__()
        self.prefix, self.trained, self.moving = prefix, trained, moving

    def train(self, mode: bool = True) -> Stage:
        """Training mode for the trained part; for the prefix only if it is `moving`."""
        super().train(mode)
        self.prefix.train(mode and self.moving)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, …) to logits (n, classes); no gradients reach the prefix."""
        with torch.no_grad():
            x = self.prefix(x)
        logits: Tensor = self.trained(x)
        return logits


class FusedNetwork(nn.Module):
    """F_fus: all fused blocks, a reduction of the last one's branches (`reduce`, see `features`), one classifier."""

    blocks: Sequence[FusedBlock]

    def __init__(self, blocks: Sequence[FusedBlock], classifier: nn.Module, reduce: Reduce = "sum") -> None:
        super().__init__()
        self.blocks, self.classifier, self.reduce = _listed(blocks), classifier, reduce
        self.recipe: dict[str, Any] = {}
        """The arguments of `fused_network`, saved in the model's file."""

    def activations(self, x: Tensor) -> list[list[Tensor]]:
        """The output of every branch of every block: [block][branch], (n, …)."""
        found, features = [], [x]
        for block in self.blocks:
            features = block(features)
            found.append(features)
        return found

    def features(self, x: Tensor) -> Tensor:
        """g(x): the last block's flattened branches, summed (n, D), averaged, or concatenated (n, M D)."""
        flat = [u.flatten(1) for u in self.activations(x)[-1]]
        if self.reduce == "concatenate":
            return torch.cat(flat, dim=1)
        total = sum(flat[1:], flat[0])
        return total / len(flat) if self.reduce == "mean" else total

    def forward(self, x: Tensor) -> Tensor:
        """Samples (n, …) to logits (n, classes)."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


def make_adaptor(kind: AdaptorKind, gathered: tuple[int, ...], takes: tuple[int, ...]) -> nn.Module | None:
    """A new adaptor (Eq. 8), from gathered features to a block's input; None for an average (Eq. 7)."""
    if kind == "average":
        return None
    return nn.Conv2d(gathered[0], takes[0], 1) if len(takes) == 3 else nn.Linear(gathered[-1], takes[-1])


def adaptor_of(state: State) -> nn.Module | None:
    """An adaptor from its `weight` and `bias`; None without them."""
    if not state:
        return None
    if state["weight"].dim() == 2:
        return linear_of(state)
    outputs, inputs, *_ = state["weight"].shape
    convolution = nn.Conv2d(inputs, outputs, 1)
    load_state(convolution, state)
    return convolution


def check_fusible(
    models: Sequence[nn.Module],
    blocks: int,
    after: Sequence[str],
    kind: AdaptorKind,
    reduce: Reduce,
    sample: tuple[int, ...],
) -> None:
    """Raises UserError if models of these architectures cannot be fused for samples of shape `sample`."""
    x = torch.zeros(1, *sample)
    rows = []
    for model in models:
        parts, classifier = cut(model, blocks, after), classifier_of(model)
        rows.append([sample, *shapes(parts, sample)])
        training = model.training
        with torch.no_grad():
            whole, out = model.eval()(x.clone()), nn.Sequential(*parts, classifier).eval()(x.clone())
        model.train(training)
        if whole.shape != out.shape or not torch.allclose(whole, out, rtol=1e-3, atol=1e-4):
            raise UserError(f"the units and classifier of {type(model).__name__} in order do not compute its output")
    for column in [*zip(*rows, strict=True)][1:-1]:
        for takes in column:
            Gather(kind, takes)([torch.zeros(1, *shape) for shape in column])
    if reduce != "concatenate" and len({math.prod(row[-1]) for row in rows}) > 1:
        raise UserError("the clients' models end in features of different lengths: use final_reduce=concatenate")


Sent = tuple[State, State, tuple[int, ...]]
"""A client's part of a fused block as sent: its adaptor's entries, its block's, the block's input shape."""


def fused_blocks(
    sent: Sequence[Mapping[int, Sent]],
    model: Callable[[int], nn.Module],
    blocks: int,
    after: Sequence[str],
    kind: AdaptorKind,
) -> list[FusedBlock]:
    """Build fused blocks from clients' messages, `sent[block][client]`, in the order of clients there.

    `model(client)` builds a model of the client's architecture, cut into `blocks` or `after` units (see `cut`).
    """
    parts = {}
    for client in dict.fromkeys(client for members in sent for client in members):
        owner = model(client)
        for members in sent:
            if client in members:
                load_state(owner, members[client][1])
        parts[client] = cut(owner, blocks, after)
    return [
        FusedBlock(
            [Branch(adaptor_of(adaptor), parts[client][k], takes) for client, (adaptor, _, takes) in members.items()],
            kind if k else None,
        )
        for k, members in enumerate(sent)
    ]


def fused_network(
    sent: Sequence[Mapping[int, Sent]],
    classifier: State,
    model: Callable[[int], nn.Module],
    blocks: int,
    after: Sequence[str],
    kind: AdaptorKind,
    reduce: Reduce,
) -> FusedNetwork:
    """Build the whole network from clients' messages (as `fused_blocks`) and the classifier's `weight` and `bias`."""
    network = FusedNetwork(fused_blocks(sent, model, blocks, after, kind), linear_of(classifier), reduce)
    takes = [{str(client): list(part[2]) for client, part in members.items()} for members in sent]
    network.recipe = {
        "kind": "fused",
        "takes": takes,
        "blocks": blocks,
        "after": list(after),
        "adaptor": kind,
        "reduce": reduce,
    }
    return network


def network_of(recipe: Mapping[str, Any], state: State, model: Callable[[int], nn.Module]) -> FusedNetwork:
    """Rebuild a network from the `recipe` and state of a file; `model` as in `fused_blocks`."""
    sent: list[dict[int, Sent]] = []
    for k, members in enumerate(recipe["takes"]):
        prefixes = [f"blocks.{k}.branches.{i}.adaptor." for i in range(len(members))]
        adaptors = [{n.removeprefix(p): v for n, v in state.items() if n.startswith(p)} for p in prefixes]
        if k and recipe["adaptor"] == "conv" and not all(adaptors):
            raise MethodError(f"it lacks an adaptor of block {k}")
        sent.append({int(c): (a, {}, tuple(t)) for (c, t), a in zip(members.items(), adaptors, strict=True)})
    classifier = {n.removeprefix("classifier."): v for n, v in state.items() if n.startswith("classifier.")}
    network = fused_network(
        sent, classifier, model, recipe["blocks"], recipe["after"], recipe["adaptor"], recipe["reduce"]
    )
    load_state(network, state)
    return network


def _listed(modules: Sequence[Any]) -> Any:
    """A ModuleList, typed as containing any module."""
    return nn.ModuleList(modules)


def _resized(x: Tensor, size: Any) -> Tensor:
    if x.shape[2:] == size:
        return x
    if x.shape[2] >= size[0] and x.shape[3] >= size[1]:
        return F.adaptive_avg_pool2d(x, size)
    return F.interpolate(x, list(size), mode="bilinear", align_corners=False)


def _folded(block: nn.Module) -> nn.Module:
    """The block in eval mode with batch normalisation folded into convolutions; unchanged if it cannot be traced."""
    try:
        return fuse(block.eval())
    except (TraceError, TypeError, ValueError, NotImplementedError, RuntimeError, AttributeError):
        return block
