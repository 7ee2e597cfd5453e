"""SmartIdx: Wu, Zou, Zhang, Jin, Xia, Fang, "SmartIdx: Reducing Communication Cost in Federated Learning by Exploiting
the CNNs Structures", AAAI 2022. Without published code, this follows the abstract and Fed-KGF's description (3.4).

A client's change, plus the unsent rest of earlier ones, is split into three packages. The fraction `density` of values
largest in magnitude is important. A kernel (a filter's weights for one input channel) with at least half of its values
important is sent whole, so that one index serves all its values. If its signs form one of the most frequent sign
patterns of such kernels, it is sent as that pattern's number and its mean magnitude. All other important values are
sent one by one. The client keeps the unsent rest for its next change (error feedback); the server adds the plain mean.
Batch-norm statistics are averaged uncompressed.

Bytes per client and round, before lossless coding: 4 D down; up 7 for each single value (24 bits for its index),
4 K + 3 for each whole kernel of K values, 7 for each kernel sent by its pattern (and one for its number), 4 s; s of the
model's D values are batch-norm statistics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor, nn

from fewbytes.base.errors import MethodError
from fewbytes.base.ranges import EXACT, LEARNT, SENT, STATISTICS, Share
from fewbytes.base.state import State
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import VECTOR_RULES
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts import compressed
from fewbytes.methods.parts.averaging import Model
from fewbytes.methods.parts.compressed import Residual, ServerModel
from fewbytes.wire import Dense, Packages, TopK, payload
from fewbytes.wire.packages import LONGEST, kernel_size
from fewbytes.wire.topk import largest


@payload
class Packed:
    """Client to server: the important values of the change, and the batch-norm statistics."""

    change: Annotated[Packages, SENT, LEARNT]
    buffers: Annotated[Dense, SENT, STATISTICS, EXACT]


@dataclass(frozen=True)
class SmartIdx(Method):
    """Hyper-parameters of SmartIdx."""

    fraction: Share = 1.0
    local: Local = Local(epochs=1, lr=0.01, batch=10)
    density: Share = 1 / 32  # fraction of all values that is sent
    patterns: Annotated[int, Meta(ge=0, le=256)] = 16  # maximum number of frequent sign patterns

    promises = Promises(
        sends="the largest values of its change, as whole kernels where possible",
        aggregates=VECTOR_RULES,
        protects={"clients"},
    )

    def server(self, problem: Problem) -> ServerModel:
        return compressed.first_server_model(problem)

    def client(self, site: Site) -> Residual:
        return Residual({})

    def round(self, state: ServerModel, net: Network, t: int) -> None:
        def check(client: Id, reply: Packed) -> None:
            if len(reply.change.patterns) > self.patterns:
                raise MethodError(f"it sent {len(reply.change.patterns)} sign patterns, more than {self.patterns}")
            most = important_values(sum(value.numel() for value in state.theta.values()), self.density)
            if (least := least_important(reply.change)) > most:
                raise MethodError(f"at least {least} of its values are important, more than {most} (its density)")

        replies = net.call(self.train, to=net.sample(self.fraction), send=compressed.message(state), check=check)
        state.theta = compressed.moved(state.theta, compressed.take_means(state, replies, net))

    def train(self, state: Residual, message: Model, site: Site) -> Packed:
        change, buffers = compressed.trained_change(message, site, self.local)
        x = state.added(change)
        sent = packages(x, self.density, self.patterns)
        state.keep(x, sent.dense())
        return Packed(sent, buffers)

    def global_model(self, state: ServerModel, problem: Problem) -> nn.Module:
        return compressed.whole(state, problem)


def packages(x: State, density: float, patterns: int) -> Packages:
    """The three packages of a change x."""
    kernels = {name: kernels_of(value) for name, value in x.items() if kernel_size(tuple(value.shape))}
    single = important(x, density)
    whole, codes = {}, {}
    for name, rows in kernels.items():
        chosen = 2 * single[name].view(rows.shape).sum(1) >= rows.shape[1]
        single[name].view(rows.shape)[chosen] = False
        whole[name] = chosen.nonzero().flatten()
        codes[name] = sign_codes(rows[whole[name]])
    table = most_frequent(torch.cat([torch.empty(0, dtype=torch.int64), *codes.values()]), patterns)
    which, patterned = [], {}
    for name, code in codes.items():
        matches = code[:, None] == table
        found = matches.any(1)
        which.append(matches.nonzero()[:, 1])
        patterned[name], whole[name] = whole[name][found], whole[name][~found]
    means = {name: rows.abs().mean(1).view(x[name].shape[:2]) for name, rows in kernels.items()}
    return Packages(
        TopK.of(x, {name: mask.nonzero().flatten() for name, mask in single.items()}),
        TopK.of(x, whole, depth=2),
        TopK.of(means, patterned),
        table,
        torch.cat([torch.empty(0, dtype=torch.int64), *which]).to(torch.uint8),
    )


def important(x: State, density: float) -> dict[str, Tensor]:
    """Flat masks of the fraction `density` of all values that is largest in magnitude."""
    flat = torch.cat([torch.empty(0), *(value.reshape(-1) for value in x.values())])
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[largest(flat, important_values(len(flat), density))] = True
    return dict(zip(x, mask.split([value.numel() for value in x.values()]), strict=True))


def important_values(values: int, density: float) -> int:
    """The number of important ones among `values` values."""
    return math.ceil(density * values)


def least_important(sent: Packages) -> int:
    """The minimum number of important values behind these packages: all single ones, and half of each kernel."""
    kernels = [*sent.whole.indices.items(), *sent.magnitudes.indices.items()]
    halves = {name: (kernel_size(shape) + 1) // 2 for name, shape in sent.single.shapes.items()}
    single = sum(len(index) for index in sent.single.indices.values())
    return single + sum(halves[name] * len(index) for name, index in kernels)


def kernels_of(value: Tensor) -> Tensor:
    """A convolution's kernels as rows, (out * in, values of a kernel)."""
    return value.reshape(-1, kernel_size(tuple(value.shape)))


def sign_codes(rows: Tensor) -> Tensor:
    """A code for each row, whose bit j is set if value j is positive; -1 for rows that are too long."""
    if rows.shape[1] > LONGEST:
        return torch.full((len(rows),), -1)
    return ((rows > 0).long() << torch.arange(rows.shape[1])).sum(1)


def most_frequent(codes: Tensor, n: int) -> Tensor:
    """At most n codes, the most frequent first, of those that occur more than once; int64."""
    found: tuple[Tensor, Tensor] = codes[codes >= 0].unique(return_counts=True)
    order = found[1].sort(descending=True, stable=True).indices[:n]
    return found[0][order[found[1][order] > 1]]
