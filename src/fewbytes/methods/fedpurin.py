"""FedPURIN: "Programmed Update and Reduced INformation for Sparse Personalized Federated Learning", Algorithm 1.

Every client keeps its own model. After local training it finds the values whose loss would move most if they were
set to zero (its critical values, Eq. 7-8) and uploads only those with a bit mask; the server averages them among
clients whose masks overlap enough (Eq. 9), takes the mean of all uploads for the rest (Eq. 10), and sends each client
the combination of the two that its own mask asks for (Eq. 11). Batch normalisation stays on the client.

The download of round t travels with the request of the client's next round (after the last round, by itself), so that
the upload it causes can be coded against it: one message each way a round, and the same T downloads in all.

Bytes per client and round, before lossless coding, with n_i critical values of d that take part:
up 4 n_i + d/8; down 4 nnz + d/8, where nnz counts the non-zeros sent (after round beta only those outside the mask).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fewbytes.base.errors import MethodError
from fewbytes.base.ranges import PART, Count, NotNegative, Samples, Share
from fewbytes.base.state import EntryMeans, State, load_state, state_of, trained_parameters
from fewbytes.core.aggregation import VOTERS, Vote
from fewbytes.core.gallery import Shares
from fewbytes.core.method import Method
from fewbytes.core.network import Made, Network
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import ENTRY_RULES
from fewbytes.core.site import Site
from fewbytes.core.table import Stack, Table, stacked
from fewbytes.core.training import Local
from fewbytes.models import batch_norm_names
from fewbytes.wire import Masked, payload

WATCHED_CLIENTS = 20  # whose masks are counted: the first ones, as many as the paper has
WATCHED_ELEMENTS = 1 << 16  # of a layer: the first ones
WORDS_AT_ONCE = 1 << 17  # of all masks, 64 bits each, that are compared: a megabyte stays near the processor


@payload
class Combined:
    """Server to client: theta_i^(t+1) at its non-zeros; with `kept`, without the critical values the client has."""

    theta: Masked
    kept: bool


@payload
class Critical:
    """Client to server: theta_i * m_i and m_i, at one bit an entry."""

    theta: Annotated[Masked, PART]
    samples: Samples


@dataclass
class Tally:
    """In how many rounds there was a mask, and in how many of them each watched element was a one of it."""

    rounds: int = 0
    ones: State = field(default_factory=dict)

    def add(self, mask: Mapping[str, Tensor]) -> None:
        self.rounds += 1
        self.ones = {name: self.ones.get(name, 0) + m.int() for name, m in watched(mask).items()}

    def shares(self) -> State:
        return {name: count / self.rounds for name, count in self.ones.items()}


@dataclass
class Counts:
    """The server's state, with `activations`: what was counted."""

    critical: dict[Id, Tally] = field(default_factory=dict)
    nonzero: Tally = field(default_factory=Tally)  # of Eq. 10's mean


@dataclass
class Personal:
    """A client's state."""

    theta: State  # theta_i, with its batch normalisation
    mask: State  # m_i of the last upload


@dataclass
class Uploads:
    """What a round's clients sent; of those with a critical value theta_i * m_i as rows of a table, and m_i packed."""

    clients: list[Id] = field(default_factory=list)
    rows: dict[Id, int] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)
    bits: list[NDArray[np.uint8]] = field(default_factory=list)
    values: Stack = field(default_factory=Stack)

    def add(self, client: Id, reply: Critical) -> None:
        self.clients.append(client)
        if len(reply.theta.values):
            self.rows[client] = len(self.rows)
            self.samples.append(float(reply.samples))
            self.values.add(reply.theta.dense())
            self.bits.append(packed({name: reply.theta.mask[name] for name in self.values.names}))

    def masks(self, start: int = 0, stop: int | None = None) -> Iterator[State]:
        """Of each row the mask, or a part of it as `Stack.part` has values."""
        for bits in self.bits:
            yield self.values.named(unpacked(bits, start, self.values.columns if stop is None else stop), start)


@dataclass(frozen=True)
class FedPURIN(Method):
    """Hyper-parameters of FedPURIN; the paper's values, its code's where the paper is silent."""

    tau: Share = 0.5  # part of each layer that is critical, in (0, 1]
    beta: Count = 100  # last round with collaboration
    gradient: Literal["exact", "delta"] = "exact"  # Eq. 7's g: the last batch's gradient, or the round's change
    hessian: bool = False  # Eq. 7's second-order term
    cutoff: NotNegative = 1e-10  # scores up to this are not critical
    batch_norm: Literal["local", "selected"] = "local"  # selected: scored and sent like any other layer
    weighted: bool = False  # Eq. 10 weighted by samples instead of 1/N
    gradient_storage: Literal["float32", "float16"] = "float32"  # float16: as the authors' code
    activations: bool = False  # count for the report how often elements are critical (Fig. 5 and 6); changes nothing
    fraction: Share = 1.0
    local: Local = Local(epochs=5, lr=0.1, batch=100, momentum=0.9)  # E, eta

    promises = Promises(
        sends="the half of its values that matter most, and a bit mask", headline="sparse", aggregates=ENTRY_RULES
    )

    def server(self, problem: Problem) -> Counts:
        return Counts()

    def client(self, site: Site) -> Personal:
        return Personal(dict(site.problem.first_state(site.me)), {})

    def round(self, state: Counts, net: Network, t: int) -> None:
        model = net.problem.first_model()
        names = taking_part(model, self.batch_norm)

        def check(client: Id, reply: Critical) -> None:
            check_mask(reply.theta.mask, model, names, self.tau)

        replies = net.call(self.train, to=net.sample(self.fraction), check=check)  # lines 3-8
        combined, mean = self.aggregate(self.watched(state, replies), t, net.clipped, net.votes())
        net.tell(self.receive, to=combined, when="next")
        if self.activations and mean:
            state.nonzero.add({name: value != 0 for name, value in mean.items()})

    def watched(self, state: Counts, replies: Iterable[tuple[Id, Critical]]) -> Iterator[tuple[Id, Critical]]:
        """The replies, counted as `activations` asks."""
        for i, reply in replies:
            if self.activations and i < WATCHED_CLIENTS:
                state.critical.setdefault(i, Tally()).add(reply.theta.mask)
            yield i, reply

    def finish(self, state: Counts, net: Network) -> None:
        if self.activations:
            clients = {f"client {i}": state.critical[i].shares() for i in sorted(state.critical)}
            net.show("activations", Shares(clients | {"server": state.nonzero.shares()}))

    def aggregate(
        self,
        replies: Iterable[tuple[Id, Critical]],
        t: int,
        clipped: Callable[[Sequence[State]], Sequence[State]] = lambda states: states,
        vote: Vote | None = None,
    ) -> tuple[Mapping[Id, Combined], State]:
        """Lines 9-13: what each client gets back, and Eq. 10's mean; both empty if there is nobody to aggregate with.

        Clients without a critical value take part in no mean. Uploads and what is made of them lie in tables, some
        columns of which are in memory at a time. `clipped` and `vote`: the run's rule, if it has another than the mean.
        """
        sent = Uploads()
        for i, reply in replies:
            sent.add(i, reply)
        if len(sent.clients) < 2 or not sent.rows:
            return {}, {}
        uploads = stacked(clipped(sent.values))
        group = collaborators(overlap(sent.masks()), t, self.beta)  # line 10
        weights = sent.samples if self.weighted else [1.0] * len(uploads)
        kept = t > self.beta
        thetas = Table(uploads.columns, uploads.dtype)
        average = torch.empty(uploads.columns, dtype=uploads.dtype)
        for start, stop in uploads.blocks():
            part, masks = uploads.part(start, stop), list(sent.masks(start, stop))
            delta: list[State] = [{}] * len(part)  # line 11, Eq. 9
            if not kept:
                delta = critical_means(part, group) if vote is None else critical_votes(part, masks, group, vote)
            mean = sparse_mean(part, weights) if vote is None else sparse_vote(part, masks, vote)  # line 12, Eq. 10
            average[start:stop] = uploads.flat(mean)
            for row, mask in enumerate(masks):
                thetas.write(row, uploads.flat(combine(delta[row], mean, mask)), start)  # Eq. 11
        everywhere = uploads.named(average)

        def combined(i: Id) -> Combined:
            theta = uploads.named(thetas.read(sent.rows[i])) if i in sent.rows else everywhere
            return Combined(Masked.nonzero(theta), kept)

        return Made(sent.clients, combined), everywhere

    def train(self, state: Personal, message: None, site: Site) -> Critical:
        model = site.model(state.theta)
        site.fit(model, self.local)  # line 4
        after, mask = state_of(model), {}
        for name in taking_part(model, self.batch_norm):
            p = model.get_parameter(name)
            theta = p.detach()  # where it was trained: its scores are made there
            g = torch.zeros_like(theta) if p.grad is None else p.grad
            if self.gradient == "delta":
                g = theta - state.theta[name].to(theta.device)
            if self.gradient_storage == "float16":
                g = g.half().float()
            mask[name] = critical(scores(theta, g, self.hessian), self.tau, self.cutoff).cpu()  # lines 5-6
        state.theta, state.mask = after, mask
        reply = Critical(Masked.of(after, mask), len(site.train))  # line 7
        load_state(model, reply.theta.dense())
        site.score("sparse", model)
        return reply

    def receive(self, state: Personal, message: Combined, site: Site) -> None:
        theta = message.theta.dense()
        if message.kept:
            theta = {name: torch.where(state.mask[name], state.theta[name], theta[name]) for name in theta}
        state.theta |= theta  # lines 14-17
        site.score("combined", site.model(state.theta))

    def local_model(self, state: Personal, site: Site) -> nn.Module:
        return site.model(state.theta)

    def observed(self, model: nn.Module) -> list[str]:
        return taking_part(model, self.batch_norm)

    def places(self, model: nn.Module, gradients: State) -> State:
        """The critical ones; what a client began with the server knows everywhere, as it sent it."""
        return {
            name: critical(scores(model.get_parameter(name).detach(), g, self.hessian), self.tau, self.cutoff)
            for name, g in gradients.items()
        }


def taking_part(model: nn.Module, batch_norm: str = "local") -> list[str]:
    """Names of the learnable tensors that collaborate: all but batch normalisation's, or all (`selected`)."""
    stay = batch_norm_names(model) if batch_norm == "local" else set()
    return [name for name in trained_parameters(model) if name not in stay]


def scores(theta: Tensor, gradient: Tensor, hessian: bool = False) -> Tensor:
    """Eq. 7: |-g theta + (g theta)^2 / 2|, or |g theta| without the second-order term; not finite counts as 0."""
    p = gradient * theta
    c = (p.square() / 2 - p).abs() if hessian else p.abs()
    return c.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def critical(score: Tensor, tau: float, cutoff: float = 1e-10, least: float | None = None) -> Tensor:
    """Eq. 8: true at the floor(tau d) largest scores of a layer of d elements, ties at the threshold included.

    A threshold up to `cutoff` becomes the smallest score above `least` (default: above the cut-off), if there is one.
    """
    flat = score.reshape(-1)
    k = int(tau * flat.numel())
    if k == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    threshold = flat.kthvalue(flat.numel() - k + 1).values
    if threshold <= cutoff:
        above = flat[flat > (cutoff if least is None else least)]
        if len(above):
            threshold = above.min()
    return score >= threshold


def check_mask(mask: State, model: nn.Module, names: Sequence[str], tau: float) -> None:
    """Raises MethodError for a mask that is not of these entries, or has more than floor(tau d) ones in one and not all
    d, as a layer on which the loss does not depend: there all scores are 0, and tie. In half precision many tie: twice
    as many may be."""
    if mask.keys() != set(names):
        raise MethodError("its mask is not of the entries that take part")
    for name, of in mask.items():
        most = int(tau * of.numel()) * (1 if model.get_parameter(name).itemsize > 2 else 2)
        if most < (ones := int(of.count_nonzero())) < of.numel():
            raise MethodError(f"its mask has {ones} ones of {of.numel()} in {name!r}, more than its part tau={tau:g}")


def packed(mask: State) -> NDArray[np.uint8]:
    """A mask's entries one after another, eight a byte, the highest bit first."""
    return np.packbits(np.concatenate([m.numpy().reshape(-1) for m in mask.values()]))


def unpacked(bits: NDArray[np.uint8], start: int, stop: int) -> Tensor:
    """The entries of a packed mask from `start` up to `stop`, flat."""
    first = start % 8
    return torch.from_numpy(np.unpackbits(bits[start // 8 : (stop + 7) // 8])[first : first + stop - start].view(bool))


def overlap(masks: Iterable[State]) -> NDArray[np.float64]:
    """O_ij = 1 - sum |m_i - m_j| / (2 n_i) over all layers, shape (N, N), not symmetric; the diagonal is NaN.

    Rows of a mask without ones are 0.
    """
    words = np.stack([np.pad(bits := packed(mask), (0, -len(bits) % 8)).view(np.uint64) for mask in masks])
    ones = np.bitwise_count(words).sum(1, dtype=np.int64)
    differ = np.zeros((len(words), len(words)), np.int64)
    width = max(1, WORDS_AT_ONCE // len(words))
    for start in range(0, words.shape[1], width):
        block = np.ascontiguousarray(words[:, start : start + width])
        for i in range(len(words) - 1):
            differ[i, i + 1 :] += np.bitwise_count(block[i + 1 :] ^ block[i]).sum(1, dtype=np.int64)
    differ += differ.T
    table = np.where(ones[:, None] > 0, 1 - differ / (2 * np.maximum(ones[:, None], 1)), 0.0)
    np.fill_diagonal(table, np.nan)
    return table


def threshold(overlaps: NDArray[np.float64], t: int, beta: int) -> float:
    """T(t) = O_avg + t/beta (O_max - O_avg) over ordered pairs; exactly O_max at t = beta."""
    pairs = overlaps[~np.isnan(overlaps)]
    average, highest = float(pairs.mean()), float(pairs.max())
    return highest if t == beta else average + t / beta * (highest - average)


def collaborators(overlaps: NDArray[np.float64], t: int, beta: int) -> NDArray[np.bool_]:
    """C_i as row i of a bool (N, N) table, i itself included: O_ij >= T(t); nobody else after round beta."""
    group = np.eye(len(overlaps), dtype=bool)
    if t <= beta and len(overlaps) > 1:
        group |= np.nan_to_num(overlaps, nan=-np.inf) >= threshold(overlaps, t, beta)
    return group


def critical_means(uploads: Sequence[State], group: NDArray[np.bool_]) -> list[State]:
    """Eq. 9: delta_i, the mean of the uploads of C_i and i, zeros included; one state per client."""
    rows = torch.from_numpy(group).double()
    means: list[State] = [{} for _ in uploads]
    for name, first in uploads[0].items():
        stacked = torch.stack([u[name].reshape(-1).double() for u in uploads])
        for i, row in enumerate((rows @ stacked) / rows.sum(1, keepdim=True)):
            means[i][name] = row.view(first.shape).to(first.dtype)
    return means


def sparse_mean(uploads: Sequence[State], weights: Sequence[float]) -> State:
    """Eq. 10: the mean of all uploads, zeros included."""
    mean = EntryMeans()
    for upload, weight in zip(uploads, weights, strict=True):
        mean.add(upload, weight)
    return mean.means()


def critical_votes(
    uploads: Sequence[State], masks: Sequence[State], group: NDArray[np.bool_], vote: Vote
) -> list[State]:
    """What stands in for Eq. 9: the vote of those of C_i and i that sent a value; i's own where they are too few."""
    votes: list[State] = [dict(upload) for upload in uploads]
    for name, first in uploads[0].items():
        values, sent = (torch.stack([state[name] for state in states]) for states in (uploads, masks))
        for i, row in enumerate(torch.from_numpy(group)):
            decided = sent[row].sum(0) >= VOTERS
            votes[i][name] = torch.where(decided, vote(values[row], sent[row]).to(first.dtype), uploads[i][name])
    return votes


def sparse_vote(uploads: Sequence[State], masks: Sequence[State], vote: Vote) -> State:
    """What stands in for Eq. 10: the vote of those that sent a value, times their part of all; 0 where they are too
    few."""
    mean: State = {}
    for name, first in uploads[0].items():
        values, sent = (torch.stack([state[name] for state in states]) for states in (uploads, masks))
        count = sent.sum(0)
        mean[name] = torch.where(count >= VOTERS, vote(values, sent) * count / len(uploads), 0.0).to(first.dtype)
    return mean


def combine(delta: State, mean: State, mask: State) -> State:
    """Eq. 11: delta where critical, the mean elsewhere; without delta, zero where critical."""
    return {k: torch.where(mask[k], delta.get(k, torch.zeros(())), mean[k]) for k in mean}


def watched(state: Mapping[str, Tensor]) -> State:
    """What Figures 5 and 6 show, flat: of convolutions the first output kernel; the last matrix, the classifier's."""
    matrices = [name for name, value in state.items() if value.dim() == 2]
    shown = {f"{name}[0]": value[0] for name, value in state.items() if value.dim() > 2}
    shown |= {name: state[name] for name in matrices[-1:]}
    return {name: value.flatten()[:WATCHED_ELEMENTS] for name, value in shown.items()}
