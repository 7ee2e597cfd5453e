"""FedKTL: Zhang, Liu, Hua, Cao, "An Upload-Efficient Scheme for Transferring Knowledge From a Server-Side Pre-trained
Generator to Clients in Heterogeneous Federated Learning", CVPR 2024, Fig. 2.

Clients keep models of any architecture. A projection to a fixed frame of class vectors, the same for all clients (ETF),
replaces their classifiers; it is trained with ArcFace (Eq. 1). Each client uploads its classes' mean vectors in this
space, the prototypes. The server trains a small transformer from prototypes to valid latent vectors of a pre-trained
image generator, which keeps classes together (Eq. 2, MSE) and the domain valid (Eq. 3, MMD). It generates one image per
class from the latent centroid and sends the pairs of image and centroid; clients learn this mapping (Eq. 4, MSE).

The pairs of round t are sent with the request of round t + 1; the generator stays on the server. The frame and the
initial values of the mapping are drawn from the seed at both ends.

Bytes per client and round, before lossless coding: up 4 K |C_i| for its |C_i| classes; down 4 H + 3 h w for each
class with a centroid, at one byte per pixel (the paper counts pixels as numbers, like everything else). With
`transfer=conditional` nothing is uploaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import Count, NotNegative, Positive, Several, Share, Whole
from fewbytes.base.rate import Way
from fewbytes.base.state import State, load_state, state_of
from fewbytes.base.streams import seeded
from fewbytes.core import gallery
from fewbytes.core.method import Method
from fewbytes.core.network import Network
from fewbytes.core.objective import Objective
from fewbytes.core.objectives import Classification
from fewbytes.core.problem import Problem
from fewbytes.core.promises import Promises
from fewbytes.core.rules import VOTES
from fewbytes.core.site import Site
from fewbytes.core.training import Local, clip_each, ready
from fewbytes.generators import ConditionalGenerator, ImageGenerator, load_generator
from fewbytes.methods.parts.distillation import endless
from fewbytes.methods.parts.heterogeneous import (
    STORED,
    ClassVectors,
    class_means,
    elected,
    feature_size,
    feature_sizes,
    gathered,
    number_of_classes,
    one_each,
)
from fewbytes.methods.parts.latents import (
    client_images,
    shortened,
    usable_classes,
    use_statistics_of,
    with_class_means,
)
from fewbytes.models.blocks import Block, features_of, head_of, head_sizes
from fewbytes.models.etf import Embedding, EtfNetwork, simplex_frame
from fewbytes.wire import Images, payload

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)  # sigma of Eq. 3's kernels exp(-d^2 / (2 sigma)), the authors' code's
CLIP = 100.0  # maximum gradient norm, everywhere in the authors' code
VALID_LATENTS = 200  # drawn to measure the lengths of valid latents, and shown


@payload
class Pairs:
    """Server to client: I^c and Qbar^c of the classes c that have a centroid."""

    images: Images
    vectors: ClassVectors


@dataclass
class KnowledgeTransfer:
    """The server's state."""

    transformer: State  # F
    centroids: Tensor  # Qbar, (C, H)
    known: list[int]  # the classes with a centroid
    pairs: Pairs | None = None  # of the last round


@dataclass
class Own:
    """A client's state."""

    theta: State  # f
    head: State  # h; with classifier=linear the model's own


@dataclass(frozen=True)
class FedKTL(Method):
    """Hyper-parameters of FedKTL; the paper's values, its code's where the paper is silent."""

    fraction: Share = 1.0  # rho
    local: Local = replace(STORED, clip=CLIP)  # clips the network's and h''s gradients
    generator: str = "compact"  # see fewbytes.generators
    mu: NotNegative = 50.0  # weight of L^M
    lambda_mse: NotNegative = 1.0  # lambda, weight in Eq. 2; 0: without
    lambda_mmd: NotNegative = 1.0  # weight of Eq. 3; 0: without
    dimension: Whole = 0  # K; 0: C
    scale: Positive = 64.0  # s of ArcFace; scale=1 and margin=0: the contrastive loss on cosines (Eq. 6)
    margin: NotNegative = 0.5  # m of ArcFace
    server_lr: Positive = 0.01  # eta_S
    server_batch: Several = 100  # B_S
    server_epochs: Count = 100  # E_S
    # conditional: pairs of the generator's own classes (+CS); images: train on them as samples, no h'; none: no L^M
    transfer: Literal["pairs", "conditional", "images", "none"] = "pairs"  # what clients learn from the generator
    classifier: Literal["etf", "linear"] = "etf"  # linear: the model's own, with the means of f(x) as prototypes
    centroids: Literal["means", "learned"] = "means"  # learned: a free table, as in the authors' code
    lengths: Literal["own", "valid"] = "own"  # lengths of centroids in pairs; valid: mean length of valid latents
    bandwidth: Literal["fixed", "median"] = "fixed"  # bandwidth of Eq. 3's kernels; median: of the squared distances
    client_noise: NotNegative = 0.0  # coefficient of Gaussian noise on uploads (NC); typically 0.2
    server_noise: NotNegative = 0.0  # coefficient of Gaussian noise on downloads (NG)
    noise_deviation: NotNegative = 0.05  # standard deviation of both noises, before the coefficient

    promises = Promises(
        sends="one small vector for each class it holds",
        headline="personalised",
        models_differ=True,
        float32_only=True,
        brings_loss=True,
        aggregates=VOTES,
    )
    needs: ClassVar[type[Objective]] = Classification

    def quick(self, epochs: int) -> Self:
        return replace(super().quick(epochs), server_epochs=10)

    def roundable(self, way: Way) -> bool:
        """With +CS clients send nothing."""
        return super().roundable(way) and (way, self.transfer) != ("uplink", "conditional")

    def server(self, problem: Problem) -> KnowledgeTransfer:
        latent = 1  # without transfer there is no generator
        if self.transfer != "none":
            if len(problem.sample_shape) != 3:
                raise UserError(f"FedKTL generates images, but samples have shape {problem.sample_shape}; try FedProto")
            generator = load_generator(self.generator)
            latent = generator.latent_dim
            if self.transfer == "conditional":
                conditional(generator, self.generator, number_of_classes(problem))
        features = feature_size(problem) if self.classifier == "linear" else max(feature_sizes(problem))
        classes = number_of_classes(problem)
        size = self.prototype_size(features, classes)
        with seeded(problem.seed, "transformer"):
            return KnowledgeTransfer(state_of(make_transformer(size, latent)), torch.randn(classes, latent), [])

    def client(self, site: Site) -> Own:
        model = site.model(fresh=True)
        features, classes = head_sizes(model)
        etf = self.classifier == "etf"
        head = nn.Linear(features, self.prototype_size(features, classes)) if etf else head_of(model)
        return Own(features_of(model).state(), state_of(head))

    def prototype_size(self, features: int, classes: int) -> int:
        """K. Raises UserError if it is too small for a frame of `classes` vectors."""
        if 0 < self.dimension < classes:
            raise UserError(
                f"dimension is {self.dimension}: give at least {classes}, the number of classes, or 0 for exactly that"
            )
        return features if self.classifier == "linear" else self.dimension or classes

    def round(self, state: KnowledgeTransfer, net: Network, t: int) -> None:
        if self.transfer == "conditional":
            with seeded(net.problem.seed, "server", t):
                self.generate_conditionally(state, net)
            net.tell(self.learn, to=net.sample(self.fraction), send=state.pairs)
            return
        units = self.classifier == "etf" and not self.client_noise
        longest = 2.0 if units else math.inf  # of unit vectors that may have been rounded
        check = one_each(len(state.centroids), state.transformer["0.weight"].shape[1], longest)
        replies = net.call(self.train, to=net.sample(self.fraction), send=state.pairs, check=check)
        prototypes, labels = gathered(replies)
        if vote := net.votes():
            prototypes = elected(prototypes, labels, vote)
        if len(labels) and self.transfer != "none":
            with seeded(net.problem.seed, "server", t):
                self.generate(state, net, prototypes, labels)

    def generate(self, state: KnowledgeTransfer, net: Network, prototypes: Tensor, labels: Tensor) -> None:
        """3.3.3: train the transformer on the prototypes (n, K), then create the pairs of all known classes."""
        generator = load_generator(self.generator)
        transformer = make_transformer(prototypes.shape[1], generator.latent_dim)
        load_state(transformer, state.transformer)
        valid = generator.sample_latents(VALID_LATENTS)
        length = float(valid.norm(dim=1).mean())
        table = state.centroids
        if self.centroids == "means":
            use_statistics_of(transformer, prototypes)
            table = shortened(with_class_means(table, transformer, prototypes, labels), length)
        table = self.align(transformer, table, prototypes, labels, generator.sample_latents)
        use_statistics_of(transformer, prototypes)
        if self.centroids == "means":
            table = with_class_means(state.centroids, transformer, prototypes, labels)
        state.transformer, state.centroids = state_of(transformer), table
        state.known = sorted({*state.known, *labels.tolist()})
        usable = usable_classes(state.centroids, state.known, valid)
        if unusable := len(state.known) - len(usable):
            net.note("centroids far from all valid latents made no pairs", f"{unusable} of {len(state.known)} classes")
        if not usable:
            state.pairs = None
            return
        vectors = state.centroids[usable]
        if self.lengths == "valid":
            vectors = length * F.normalize(vectors, dim=1)
        state.pairs = self.pairs_of(generator, net.problem, vectors, usable)
        show_images(net, state.pairs)
        show_points(net, transformer, prototypes, labels, valid)

    def generate_conditionally(self, state: KnowledgeTransfer, net: Network) -> None:
        """+CS: for each class a pair from one of the generator's own classes, drawn once, without alignment."""
        classes = len(state.centroids)
        generator = conditional(load_generator(self.generator), self.generator, classes)
        with seeded(net.problem.seed, "generator's classes"):
            drawn = torch.randperm(generator.classes)[:classes]
        state.centroids, state.known = generator.class_latents(drawn), list(range(classes))
        state.pairs = self.pairs_of(generator, net.problem, state.centroids, state.known)
        show_images(net, state.pairs)

    def pairs_of(self, generator: ImageGenerator, problem: Problem, vectors: Tensor, classes: list[int]) -> Pairs:
        """Latent vectors (n, H) of classes with their images, as sent to clients."""
        images = client_images(generator.synthesise(vectors), problem.sample_shape)
        images, vectors = (noisy(v, self.server_noise * self.noise_deviation) for v in (images, vectors))
        return Pairs(Images.of(images.clamp(0, 1)), ClassVectors.of(vectors, classes))

    def align(
        self,
        transformer: nn.Module,
        centroids: Tensor,
        prototypes: Tensor,
        labels: Tensor,
        latents: Callable[[int], Tensor],
    ) -> Tensor:
        """3.3.3: train F in place on prototypes (n, K) of classes `labels` (n,); the centroids (C, H) afterwards.

        During training, a trained table replaces the class means. `latents(n)`: n valid latent vectors.
        """
        free = nn.Parameter(centroids.clone())
        optimisers = [
            torch.optim.Adam(transformer.parameters(), self.server_lr),
            torch.optim.Adam([free], self.server_lr),
        ]
        transformer.train()
        for _ in range(self.server_epochs if len(labels) > 1 else 0):
            for rows in torch.randperm(len(labels)).split(self.server_batch):
                if len(rows) < 2:  # batch normalisation needs at least two
                    continue
                q = transformer(prototypes[rows])
                loss = torch.zeros(())
                if self.lambda_mse:
                    loss = loss + self.lambda_mse * F.mse_loss(q, free[labels[rows]])  # Eq. 2
                if self.lambda_mmd:
                    loss = loss + self.lambda_mmd * mmd(q, latents(len(rows)), self.bandwidth)
                for optimiser in optimisers:
                    optimiser.zero_grad()
                loss.backward()
                clip_each(CLIP, transformer)
                nn.utils.clip_grad_norm_([free], CLIP)
                for optimiser in optimisers:
                    optimiser.step()
        return free.detach()

    def train(self, state: Own, message: Pairs | None, site: Site) -> ClassVectors:
        own = self.fit(state, message, site)
        means = class_means(*site.outputs(own.embedding))
        rows = means.rows if self.classifier == "linear" else F.normalize(means.rows, dim=1)
        return ClassVectors.of(noisy(rows, self.client_noise * self.noise_deviation), means.classes)

    def learn(self, state: Own, message: Pairs, site: Site) -> None:
        """+CS: nothing is uploaded."""
        self.fit(state, message, site)

    def fit(self, state: Own, message: Pairs | None, site: Site) -> Parts:
        """Local training, with L^M if there are several pairs (a single one cannot be batch-normalised); returns the
        client's trained model."""
        own = self.parts(state, site)
        joint, extra, more, local = Joint(own.network), None, None, self.local
        pairs = 0 if message is None else len(message.vectors.classes)
        if message is not None and pairs > 1 and self.transfer in ("pairs", "conditional"):
            images, vectors = ready(message.images.values().to(site.device)), message.vectors.rows.to(site.device)
            with seeded(site.problem.seed, "mapping"):  # h' starts the same on every client, in every round
                joint.mapping = nn.Linear(head_sizes(own.model)[0], vectors.shape[1])
            extra = self.transfer_loss(joint, own.features, images, vectors)
        elif message is not None and self.transfer == "images":
            more = message.images.values(), torch.tensor(message.vectors.classes)
            local = replace(local, order="shuffled", last="merged")  # so that no pair is skipped
        site.fit(joint, local, more, loss=self.loss, extra=extra)
        state.theta, state.head = own.features.state(), state_of(own.head)
        return own

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """L^A: Eq. 1, or plain cross-entropy of the logits."""
        if self.classifier == "etf":
            scores = arcface_logits(scores, labels, self.scale, self.margin)
        return F.cross_entropy(scores, labels)

    def transfer_loss(
        self, joint: Joint, features: nn.Module, images: Tensor, vectors: Tensor
    ) -> Callable[[nn.Module], Tensor]:
        """A function that returns mu L^M of the next batch of pairs (Eq. 4): h'(f(I)) against Qbar."""
        batches = endless(len(images), self.local.batch)

        def loss(_: nn.Module) -> Tensor:
            rows = next(batches)
            return self.mu * F.mse_loss(joint.mapping(features(images[rows])), vectors[rows])

        return loss

    def parts(self, state: Own, site: Site) -> Parts:
        """The client's model with the values of its state."""
        model = site.model(state.theta)
        features = features_of(model)
        if self.classifier == "linear":
            load_state(head_of(model), state.head)
            return Parts(model, model, features, head_of(model), features)
        width, classes = head_sizes(model)
        head = nn.Linear(width, self.prototype_size(width, classes)).to(site.device)
        load_state(head, state.head)
        with seeded(site.problem.seed, "frame"):
            u, _ = torch.linalg.qr(torch.rand(head.out_features, classes, dtype=torch.float64))
        network = EtfNetwork(Embedding(features, head), simplex_frame(u).to(site.device))
        network.recipe["client"] = site.me
        return Parts(model, network, features, head, network.embedding)

    def local_model(self, state: Own, site: Site) -> nn.Module:
        return self.parts(state, site).network


@dataclass(frozen=True)
class Parts:
    """A client's model and its parts by purpose."""

    model: nn.Module  # as the task builds it
    network: nn.Module  # samples to scores (n, C)
    features: Block  # f
    head: nn.Module  # h
    embedding: nn.Module  # samples to vectors, whose means are prototypes


class Joint(nn.Module):
    """The modules trained together: the classifying network, and h' if there are pairs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.mapping: nn.Module

    @property
    def apart(self) -> list[nn.Module]:
        """The modules whose gradients are clipped separately."""
        return list(self.children())

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.network(x)
        return scores


def arcface_logits(cosines: Tensor, labels: Tensor, scale: float, margin: float) -> Tensor:
    """Eq. 1's logits: s cos, with the angle of the true class widened by m; (n, C)."""
    at = labels[:, None]
    angle = cosines.gather(1, at).clamp(-1 + 1e-7, 1 - 1e-7).arccos()  # at +-1 the arc cosine has no gradient
    return scale * cosines.scatter(1, at, (angle + margin).cos())


def make_transformer(dimension: int, latent: int) -> nn.Sequential:
    """F: two linear layers and a batch normalisation (Fig. 2b), (n, K) to (n, H)."""
    return nn.Sequential(
        nn.Linear(dimension, dimension), nn.BatchNorm1d(dimension), nn.ReLU(), nn.Linear(dimension, latent)
    )


def mmd(x: Tensor, y: Tensor, bandwidth: Literal["fixed", "median"] = "fixed") -> Tensor:
    """Eq. 3: the squared maximum mean discrepancy of two samples (n, H), biased, with four Gaussian kernels."""
    both = torch.cat([x, y])
    both = both - both.detach().mean(0)  # keeps distances, reduces rounding errors
    norms = both.square().sum(1)
    squared = (norms[:, None] + norms - 2 * both @ both.T).clamp_min(0)
    unit = 1.0 if bandwidth == "fixed" else F.pdist(both.detach()).square().median().item() / BANDWIDTHS[-1] or 1.0
    kernel = sum((torch.exp(squared / (-2 * sigma * unit)) for sigma in BANDWIDTHS), torch.zeros(()))
    n = len(x)
    value: Tensor = kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()
    return value


def noisy(values: Tensor, deviation: float) -> Tensor:
    """The values with Gaussian noise (Table 10)."""
    return values + deviation * torch.randn_like(values) if deviation else values


def conditional(generator: ImageGenerator, name: str, classes: int) -> ConditionalGenerator:
    """The generator, if it has at least `classes` classes of its own. Raises UserError, naming it, otherwise."""
    if not isinstance(generator, ConditionalGenerator) or generator.classes < classes:
        raise UserError(
            f"transfer is conditional, but the generator {name} does not have {classes} classes of its own: name a "
            "StyleGAN-XL that does, or leave transfer at pairs"
        )
    return generator


def show_images(net: Network, pairs: Pairs) -> None:
    """Show the images by class in the report."""
    known = net.problem.classes
    names = [known[c] if c < len(known) else f"class {c}" for c in pairs.vectors.classes]
    if pairs.images.pixels.shape[1] in (1, 3):
        net.show("generated", gallery.Images(pairs.images.pixels, names))


def show_points(net: Network, transformer: nn.Module, prototypes: Tensor, labels: Tensor, latents: Tensor) -> None:
    """Show prototypes before and after the transformer, among valid latents, in the report (Fig. 2c)."""
    with torch.no_grad():
        transformed = transformer.eval()(prototypes)
    after = {"prototypes": (transformed, labels), "valid latents": (latents, None)}
    before = {"prototypes": (prototypes, labels)}
    net.show("prototypes", gallery.Points({"uploaded prototypes": before, "after the transformer": after}))
