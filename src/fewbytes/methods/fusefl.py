"""FuseFL: Tang, Zhang, Dong, Cheung, Zhou, Han, Chu, "FuseFL: One-Shot Federated Learning through the Lens of Causality
with Progressive Model Fusion", NeurIPS 2024, Algorithm 1.

The model is cut into K blocks. At stage k every client trains its blocks from k on, after the frozen, fused blocks
before k and an adaptor (Eq. 8: a 1x1 convolution of all clients' features; Eq. 7: their mean). It uploads block k with
its adaptor, and receives the other clients'. Fused blocks run in parallel; at the end the classifiers are averaged and
calibrated on virtual features drawn from the clients' class statistics (CCVR). A model is sent once, in K parts.

Each stage takes one round, and the run has K rounds, whatever number is requested. The download of stage k is sent with
the request of stage k + 1. A stage fuses the blocks of the clients that reply; a client that missed a stage gets the
missing blocks with the next request and takes part again.

Bytes per client over the whole run, before lossless coding, with P_k and A_k values of block k (buffers too) and of its
adaptor, L of the classifier: up 4 (sum_k (P_k + A_k) + L) and for each class it has 4 (D + D (D + 1) / 2), 8 C for the
counts; down 4 (sum_k sum_(j != m) (P_k + A_k) + L). Counters of batch normalisation take 8 bytes each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self, cast

import torch
from torch import Tensor, nn

from fewbytes.base.errors import MethodError
from fewbytes.base.ranges import EXACT, FRESH, Count, Whole
from fewbytes.base.state import State, state_of
from fewbytes.base.streams import seeded
from fewbytes.core.admission import check_like, norm
from fewbytes.core.method import Method
from fewbytes.core.network import Network, Vote
from fewbytes.core.policy import TooFewReplies
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import ENTRY_RULES
from fewbytes.core.site import Site
from fewbytes.core.training import Local
from fewbytes.methods.parts.ccvr import ClassStatistics, Covariance, calibrated, class_statistics, of_features
from fewbytes.methods.parts.one_shot import check_stages, of_stage, shorter
from fewbytes.models.blocks import Block, check_trains, classifier_of, cut, shapes
from fewbytes.models.builders import convolutional
from fewbytes.models.fused import (
    AdaptorKind,
    FusedNetwork,
    Gather,
    Prefix,
    Reduce,
    Sent,
    Stage,
    check_fusible,
    fused_blocks,
    fused_network,
    make_adaptor,
)  # fmt: skip
from fewbytes.wire import Dense, payload
from fewbytes.wire.layout import Forms, forms_of

GROWTH = 25.0  # maximum norm of a trained block or adaptor, as a multiple of a new one's: others train after it


@payload
class FusedPart:
    """One client's part of a fused block: A_m^k, H_m^k with its buffers, and the shape the block takes."""

    adaptor: Dense
    block: Dense
    takes: list[int]


@payload
class Fused:
    """Server to client: the fused blocks it lacks, by client in order; None stands for its own part."""

    blocks: Annotated[list[dict[Id, FusedPart | None]], EXACT]  # equal for all clients
    statistics: Annotated[list[dict[Id, Dense]], EXACT]  # frozen_bn=train_shared: of all fused blocks' batch norm
    classifier: Annotated[Dense | None, EXACT]  # at the end


@payload
class Trained:
    """Client to server: its part of block k; with the last block also its classifier."""

    branch: Annotated[FusedPart, FRESH]
    classifier: Annotated[Dense | None, FRESH]
    statistics: list[dict[Id, Dense]]  # as in Fused, after this client's training


@dataclass
class FusedBlocks:
    """The server's state."""

    fused: list[dict[Id, FusedPart]] = field(default_factory=list)
    clipped: list[list[Id]] = field(default_factory=list)  # by block, the clients whose parts were clipped
    known: dict[Id, int] = field(default_factory=dict)  # number of fused blocks that each client has
    classifier: State = field(default_factory=dict)  # Lambda: the mean, later calibrated


@dataclass
class Own:
    """A client's state."""

    theta: State  # its own model: blocks and classifier
    fused: list[dict[Id, FusedPart]] = field(default_factory=list)
    sent: FusedPart | None = None  # its part of the last block it trained
    classifier: State = field(default_factory=dict)  # the fused network's, at the end


@dataclass(frozen=True)
class FuseFL(Method):
    """Hyper-parameters of FuseFL; the paper's values, its code's where the paper gives none."""

    blocks: Count = 4  # K, cut at the model's default points
    cuts: str = ""  # instead: cut after these units, comma-separated, e.g. stem,layers.1
    adaptor: AdaptorKind = "conv"  # Eq. 8, or Eq. 7
    frozen_bn: Literal["eval", "train_shared"] = "eval"  # train_shared: as in the authors' code, client by client
    final_reduce: Reduce = "sum"  # how the last block's branches are combined
    ccvr_samples: Whole = 5000  # virtual features per class; 0: no calibration
    ccvr_covariance: Covariance = "correct"  # released: as the authors' code computes it
    local: Local = Local(epochs=200, lr=0.01, batch=128, momentum=0.9)  # E in total, E/K per stage (>= K); or steps

    promises = Promises(
        sends="its whole model once, block by block",
        float32_only=True,
        scored_after_finish=True,
        aggregates=ENTRY_RULES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        fewer = f", or fewer {'cuts' if self.cuts else 'blocks'}"
        check_stages(self.local, self.planned_rounds(1), "blocks, which train one after another", fewer)

    def planned_rounds(self, asked: int) -> int:
        return len(self.after) + 1 if self.cuts else self.blocks

    def model_for(self, shape: tuple[int, ...]) -> str:
        """A model with a unit for each block."""
        usual = convolutional(super().model_for(shape), shape)
        return f"mlp:layers={self.planned_rounds(1)}" if usual == "mlp" else usual

    def quick(self, epochs: int) -> Self:
        """As in `Method`, with fewer blocks if there are fewer epochs."""
        local = shorter(self.local, epochs)
        return replace(self, blocks=min(self.blocks, epochs), ccvr_samples=min(self.ccvr_samples, 500), local=local)

    @property
    def after(self) -> list[str]:
        """The named units after which models are cut, if any."""
        return [name.strip() for name in self.cuts.split(",")] if self.cuts else []

    def server(self, problem: Problem) -> FusedBlocks:
        models = [problem.model(i).cpu() for i in problem.architectures()]
        if problem.sample is not None:  # refuse models that cannot be fused before training
            check_fusible(models, self.blocks, self.after, self.adaptor, self.final_reduce, problem.sample_shape)
        for model in models:
            check_trains(classifier_of(model), model)
        return FusedBlocks()

    def client(self, site: Site) -> Own:
        return Own(dict(site.problem.first_state(site.me)))

    def round(self, state: FusedBlocks, net: Network, t: int) -> None:
        before, branches, classifiers = len(state.fused), {}, []
        check = self.parts_like(state, net.problem.on_cpu())
        groups = [[i] for i in net.clients] if self.frozen_bn == "train_shared" else [net.clients]
        for group in groups:
            try:
                news = {i: self.news(state, i) for i in group}
                for i, reply in net.call(self.train, to=news, check=check):  # lines 4-20
                    branches[i], state.known[i] = reply.branch, before
                    state.fused = moved(state.fused, reply.statistics)
                    if reply.classifier is not None:
                        classifiers.append(reply.classifier.dense())
            except TooFewReplies:
                if len(groups) == 1 or (group == groups[-1] and not branches):
                    raise
                net.note("clients that did not reply are not in the block", f"client {group[0]}")
        clipped = shortened(branches, net.clipped)
        state.clipped.append(list(clipped))
        state.fused.append(branches | clipped)  # line 22
        if classifiers:
            state.classifier = averaged(net.clipped(classifiers), self.final_reduce, net.votes())

    def parts_like(self, state: FusedBlocks, problem: Problem) -> Callable[[Id, Trained], None]:
        """A check for `Network.call`: the next block's part must match the client's model and have an adaptor for
        all earlier blocks, neither beyond GROWTH; statistics of fused blocks if requested."""
        known: dict[Any, Trained] = {}  # by architecture

        def check(client: Id, reply: Trained) -> None:
            key = problem.architecture(client)
            if key not in known:
                known[key] = self.untrained(state, problem, client)
            wanted, statistics = known[key], problem.statistics(client)
            check_part(reply.branch, wanted.branch, statistics)
            if (reply.classifier is None) != (wanted.classifier is None):
                raise MethodError("its classifier is not with the last block")
            if reply.classifier is not None and wanted.classifier is not None:
                check_like(reply.classifier.state, wanted.classifier.state)
            if _forms(reply.statistics) != _forms(wanted.statistics):
                raise MethodError("its upload has other statistics of fused blocks than requested")

        return check

    def untrained(self, state: FusedBlocks, problem: Problem, client: Id) -> Trained:
        """A reply with a client's shapes but other values; its first block takes [] if sample shapes are unknown."""
        model = problem.model(client)
        blocks, classifier, k = cut(model, self.blocks, self.after), classifier_of(model), len(state.fused)
        with seeded(problem.seed, "untrained", k):
            _, adaptor, takes = self.before(state.fused, problem.model, blocks, sample_shape(state, problem), "cpu")
        branch = FusedPart(Dense(state_of(adaptor) if adaptor else {}), Dense(blocks[k].state()), list(takes))
        last = Dense(state_of(classifier)) if k == len(blocks) - 1 else None
        return Trained(branch, last, statistics_of(state.fused) if self.frozen_bn == "train_shared" else [])

    def before(
        self,
        fused: Sequence[Mapping[Id, FusedPart]],
        model: Callable[[Id], nn.Module],
        blocks: Sequence[Block],
        sample: tuple[int, ...],
        device: str,
    ) -> tuple[Prefix | None, nn.Module | None, tuple[int, ...]]:
        """The modules before block k: the fused blocks, if any, and a new adaptor, if needed (line 24); and the input
        shape of block k."""
        if not fused:
            return None, None, sample
        takes = shapes(blocks[: len(fused)], sample, device)[-1]
        parts = fused_blocks(sent(fused), model, self.blocks, self.after, self.adaptor)
        prefix = Prefix(parts, Gather(self.adaptor, takes))
        return prefix, make_adaptor(self.adaptor, shapes([prefix], sample, device)[0], takes), takes

    def finish(self, state: FusedBlocks, net: Network) -> None:
        if self.ccvr_samples:
            check = of_features(*state.classifier["weight"].shape)
            replies = dict(net.call(self.statistics, to={i: self.news(state, i) for i in net.clients}, check=check))
            state.known |= dict.fromkeys(replies, len(state.fused))
            state.classifier = calibrated(
                state.classifier, list(replies.values()), self.ccvr_samples, self.ccvr_covariance, self.local,
                net.rng, net.votes(),
            )  # fmt: skip
        net.tell(self.receive, to={i: self.news(state, i, Dense(state.classifier)) for i in net.clients})

    def news(self, state: FusedBlocks, client: Id, classifier: Dense | None = None) -> Fused | None:
        """The message to a client: None before the first block."""
        fresh = list(zip(state.fused, state.clipped, strict=True))[state.known.get(client, 0) :]
        blocks = [
            {i: None if i == client and i not in clipped else branch for i, branch in members.items()}
            for members, clipped in fresh
        ]
        statistics = statistics_of(state.fused) if self.frozen_bn == "train_shared" else []
        return Fused(blocks, statistics, classifier) if state.fused else None

    def train(self, state: Own, message: Fused | None, site: Site) -> Trained:
        learn(state, message)
        k = len(state.fused)  # blocks before this one
        model = site.model(state.theta)
        blocks, classifier = cut(model, self.blocks, self.after), classifier_of(model)
        shape, device = site.train.shape, site.device
        prefix, adaptor, takes = self.before(state.fused, lambda i: site.model(of=i), blocks, shape, device)
        own = nn.Sequential(*([] if adaptor is None else [adaptor]), *blocks[k:], classifier)  # Gamma_m^k
        moving = self.frozen_bn == "train_shared"
        stage = own if prefix is None else Stage(prefix, own, moving)
        site.fit(
            stage if moving else own,
            of_stage(self.local, k, len(blocks)),
            frozen=None if moving or prefix is None else prefix.folded(),
        )
        site.score("local", stage)
        state.theta = state_of(model)
        state.sent = FusedPart(
            Dense({} if adaptor is None else state_of(adaptor)), Dense(blocks[k].state()), list(takes)
        )
        last = Dense(state_of(classifier)) if k == len(blocks) - 1 else None
        statistics = []
        if moving and prefix is not None:
            for members, block in zip(state.fused, prefix.blocks, strict=True):
                parts = zip(members, block.branches, strict=True)
                statistics.append({i: running(cast(Block, branch.block).state()) for i, branch in parts})
        return Trained(state.sent, last, statistics)

    def statistics(self, state: Own, message: Fused | None, site: Site) -> ClassStatistics:
        """Statistics of the fused features of this client's samples, by class."""
        learn(state, message)
        classifier = classifier_of(site.model(state.theta))
        network = self.network(state.fused, state_of(classifier), lambda i: site.model(of=i))
        network.classifier = nn.Identity()
        return class_statistics(*site.outputs(network), classes=classifier.out_features)

    def receive(self, state: Own, message: Fused | None, site: Site) -> None:
        """Keep the calibrated classifier, which completes the fused network."""
        learn(state, message)
        site.score("personalised", self.network(state.fused, state.classifier, lambda i: site.model(of=i)))

    def global_model(self, state: FusedBlocks, problem: Problem) -> FusedNetwork | None:
        return self.network(state.fused, state.classifier, problem.model) if state.classifier else None

    def network(
        self, fused: list[dict[Id, FusedPart]], classifier: State, model: Callable[[Id], nn.Module]
    ) -> FusedNetwork:
        """F_fus."""
        return fused_network(sent(fused), classifier, model, self.blocks, self.after, self.adaptor, self.final_reduce)


def shortened(
    branches: Mapping[Id, FusedPart], clipped: Callable[[Sequence[State]], Sequence[State]]
) -> dict[Id, FusedPart]:
    """The parts of a block that the run's rule clips, after clipping; none for the mean."""
    states = [
        {f"adaptor {name}": value for name, value in branch.adaptor.dense().items()}
        | {f"block {name}": value for name, value in branch.block.dense().items()}
        for branch in branches.values()
    ]
    found = {}
    for (i, branch), before, after in zip(branches.items(), states, clipped(states), strict=True):
        if after is not before:
            adaptor = {name: after[f"adaptor {name}"] for name in branch.adaptor.dense()}
            block = {name: after[f"block {name}"] for name in branch.block.dense()}
            found[i] = replace(branch, adaptor=Dense(adaptor), block=Dense(block))
    return found


def averaged(classifiers: Sequence[State], reduce: Reduce, vote: Vote | None = None) -> State:
    """The unweighted mean of the classifiers, or their vote; for concatenated features they are concatenated, each
    divided by M."""
    rows = {name: [classifier[name] for classifier in classifiers] for name in classifiers[0]}
    if reduce == "concatenate":
        weight = torch.cat(rows.pop("weight"), dim=1) / len(classifiers)
        return {"weight": weight, **_means(rows, vote)}
    return _means(rows, vote)


def _means(rows: Mapping[str, Sequence[Tensor]], vote: Vote | None) -> State:
    means = {}
    for name, row in rows.items():
        values = torch.stack(list(row)).double()
        mean = values.mean(0) if vote is None else vote(values, torch.ones_like(values, dtype=torch.bool))
        means[name] = mean.to(row[0].dtype)
    return means


def learn(state: Own, message: Fused | None) -> None:
    """Line 20: store the server's message; None stands for this client's own part."""
    if message is None:
        return
    for members in message.blocks:
        state.fused.append({i: branch or cast("FusedPart", state.sent) for i, branch in members.items()})
    state.fused = moved(state.fused, message.statistics)
    if message.classifier is not None:
        state.classifier = message.classifier.dense()


def sent(fused: Sequence[Mapping[Id, FusedPart]]) -> list[dict[Id, Sent]]:
    """Fused blocks in the form that `fused_blocks` takes."""
    return [
        {i: (part.adaptor.dense(), part.block.dense(), tuple(part.takes)) for i, part in members.items()}
        for members in fused
    ]


def check_part(part: FusedPart, wanted: FusedPart, statistics: Set[str]) -> None:
    """Raises MethodError for a client's part of a block that does not match `wanted`, or is beyond GROWTH."""
    if wanted.takes and part.takes != wanted.takes:
        raise MethodError(f"its block takes {part.takes[:8]}, its model's {wanted.takes}")
    for what in ("adaptor", "block"):
        sent, first = (getattr(each, what).dense() for each in (part, wanted))
        check_like(sent, first)
        size, least = (norm(v for n, v in state.items() if n not in statistics) for state in (sent, first))
        if size > GROWTH * max(1.0, least):
            raise MethodError(f"its {what} is of norm {size:.3g}, more than {GROWTH:g} times a new one's {least:.3g}")


def _forms(statistics: Sequence[Mapping[Id, Dense]]) -> list[dict[Id, Forms]]:
    return [{i: forms_of(value.state) for i, value in members.items()} for members in statistics]


def sample_shape(state: FusedBlocks, problem: Problem) -> tuple[int, ...]:
    """The shape of a sample: the known one, else that of most clients' first blocks, or () if there are none."""
    if problem.sample is not None:
        return problem.sample_shape
    shapes = Counter(tuple(part.takes) for members in state.fused[:1] for part in members.values())
    return shapes.most_common(1)[0][0] if shapes else ()


def statistics_of(fused: Sequence[Mapping[Id, FusedPart]]) -> list[dict[Id, Dense]]:
    """The batch-norm statistics of all fused blocks."""
    return [{i: running(part.block.dense()) for i, part in members.items()} for members in fused]


def running(block: State) -> Dense:
    """The batch-norm statistics among a block's entries."""
    names = "running_mean", "running_var", "num_batches_tracked"
    return Dense({k: v for k, v in block.items() if k.rpartition(".")[2] in names})


def moved(fused: list[dict[Id, FusedPart]], statistics: Sequence[Mapping[Id, Dense]]) -> list[dict[Id, FusedPart]]:
    """Fused blocks with new batch-norm statistics (frozen_bn=train_shared)."""
    return (
        [
            {i: replace(part, block=Dense(part.block.dense() | now[i].dense())) for i, part in members.items()}
            for members, now in zip(fused, statistics, strict=True)
        ]
        if statistics
        else fused
    )
