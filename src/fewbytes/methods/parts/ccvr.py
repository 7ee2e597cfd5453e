"""CCVR: Luo, Chen, Hu, Zhang, Liang, Feng, "No Fear of Heterogeneity: Classifier Calibration for Federated Learning
with Non-IID Data", NeurIPS 2021: feature statistics per class, merged over clients; virtual features drawn from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from fewbytes.base.ranges import COUNTS, EXACT
from fewbytes.base.state import State, state_of
from fewbytes.base.streams import seed_torch
from fewbytes.core.admission import check_like
from fewbytes.core.network import Vote
from fewbytes.core.problem import Id
from fewbytes.core.training import Local, fit
from fewbytes.models.blocks import linear_of
from fewbytes.wire import Dense, payload

Covariance = Literal["correct", "released"]


@payload
class ClassStatistics:
    """One client's feature statistics for its classes, in ascending order.

    `counts`: `n` (classes,) int64, zero for classes it does not have. `means`: `mean` (present, D); `scatters`:
    `scatter` (present, D (D + 1) / 2), the lower triangles of sum (g - mean)(g - mean)^T; float32.
    """

    counts: Annotated[Dense, COUNTS]
    means: Annotated[Dense, EXACT]  # small compared with the scatters
    scatters: Dense


def of_features(classes: int, size: int) -> Callable[[Id, ClassStatistics], None]:
    """A check for `Network.call`: statistics of `size` features, for exactly the classes with a count above zero."""

    def check(client: Id, reply: ClassStatistics) -> None:
        check_like(reply.counts.state, {"n": torch.empty(classes, dtype=torch.int64)})
        present = int(reply.counts.state["n"].count_nonzero())
        check_like(reply.means.state, {"mean": torch.empty(present, size)})
        check_like(reply.scatters.state, {"scatter": torch.empty(present, size * (size + 1) // 2, device="meta")})

    return check


def class_statistics(features: Tensor, labels: Tensor, classes: int) -> ClassStatistics:
    """Statistics of features (n, D) with labels (n,), summed in float64."""
    means, scatters, size = [], [], features.shape[1]
    counts = torch.bincount(labels.cpu(), minlength=classes)
    lower = torch.tril_indices(size, size)
    for c in counts.nonzero().flatten():
        rows = features[labels == c].to("cpu", torch.float64)
        mean = rows.mean(0)
        centred = rows - mean
        means.append(mean)
        scatters.append((centred.T @ centred)[lower[0], lower[1]])
    return ClassStatistics(
        Dense({"n": counts}),
        Dense({"mean": torch.stack(means).float()}),
        Dense({"scatter": torch.stack(scatters).float()}),
    )


def whole(statistics: ClassStatistics) -> tuple[Tensor, Tensor, Tensor]:
    """Counts (C,), means (C, D) and scatter matrices (C, D, D) in float64; zeros for absent classes."""
    counts = statistics.counts.state["n"]
    mean, scatter = statistics.means.state["mean"].double(), statistics.scatters.state["scatter"].double()
    classes, size = len(counts), mean.shape[1]
    means, scatters = torch.zeros(classes, size).double(), torch.zeros(classes, size, size).double()
    present, lower = counts.nonzero().flatten(), torch.tril_indices(size, size)
    means[present] = mean
    for row, c in enumerate(present):
        scatters[c, lower[0], lower[1]] = scatter[row]
        scatters[c, lower[1], lower[0]] = scatter[row]
    return counts, means, scatters


def merge(
    counts: Tensor, means: Tensor, scatters: Iterable[Tensor], covariance: Covariance = "correct"
) -> tuple[Tensor, Tensor, Tensor]:
    """N_c (C,), mu_c (C, D), Sigma_c (C, D, D) from clients' counts (M, C), means (M, C, D), scatters (C, D, D) each.

    Sigma_c = (sum_m S_mc + sum_m n_mc (mu_mc - mu_c)(mu_mc - mu_c)^T) / (N_c - 1), which is CCVR's formula for unbiased
    local covariances; zero where N_c = 1. Rows of classes without samples are NaN. `released`: as FuseFL's code
    computes it, with biased local covariances and without the last term, - N_c / (N_c - 1) mu_c mu_c^T.
    """
    n = counts.double()
    total = n.sum(0)
    mean = torch.einsum("mc,mcd->cd", n, means) / total[:, None]
    cov = torch.zeros(*mean.shape, mean.shape[1]).double()
    for i, scatter in enumerate(scatters):  # one at a time: they are large
        if covariance == "released":
            weight, apart = (n[i] - 1).clamp(min=0) / n[i].clamp(min=1), means[i]
        else:
            weight, apart = torch.ones_like(n[i]), means[i] - mean
        cov += weight[:, None, None] * scatter + n[i, :, None, None] * apart[:, :, None] * apart[:, None, :]
    cov /= (total - 1).clamp(min=1)[:, None, None]
    cov[total == 0] = torch.nan
    return total.long(), mean, cov


def elected(counts: Tensor, means: Tensor, scatters: Sequence[Tensor], vote: Vote) -> tuple[Tensor, Tensor, Tensor]:
    """As `merge`, by a vote of the clients that have a class, unweighted by samples: first on its mean, then on its
    covariance around that mean, from each client's local covariance and mean."""
    present = counts > 0
    mean = vote(means, present[:, :, None].expand_as(means))
    cov = torch.zeros(*mean.shape, mean.shape[1]).double()
    for c in range(len(mean)):  # one at a time: they are large
        apart = means[:, c] - mean[c]
        own = torch.stack([scatter[c] for scatter in scatters]) / (counts[:, c] - 1).clamp(min=1)[:, None, None]
        around = own + apart[:, :, None] * apart[:, None, :]
        cov[c] = vote(around, present[:, c, None, None].expand_as(around))
    return counts.sum(0), mean, cov


def virtual_features(
    totals: Tensor, means: Tensor, covariances: Tensor, samples: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Features (present classes * samples, D), float32, and labels: `samples` draws of N(mu_c, Sigma_c) per class.

    Covariances may be rank-deficient: they are factored by eigenvalues, and negative ones count as zero.
    """
    drawn, labels = [], []
    for c in totals.nonzero().flatten().tolist():
        values, vectors = torch.linalg.eigh(covariances[c])
        factor = vectors * values.clamp(min=0).sqrt()
        noise = torch.from_numpy(rng.standard_normal((samples, len(values))))
        drawn.append((means[c] + noise @ factor.T).float())
        labels.append(torch.full((samples,), c))
    return torch.cat(drawn), torch.cat(labels)


def calibrated(
    classifier: State, clients: Sequence[ClassStatistics], samples: int, covariance: Covariance, local: Local,
    rng: np.random.Generator, vote: Vote | None = None,
) -> State:  # fmt: skip
    """The linear classifier after one epoch on virtual features from the clients' merged, or voted, statistics.

    Training is shuffled plain SGD on the cross-entropy, without momentum, with the lr and batch of `local`.
    """
    counts, means = (torch.stack(part) for part in zip(*(whole(client)[:2] for client in clients), strict=True))
    scatters = (whole(client)[2] for client in clients)
    merged = (
        merge(counts, means, scatters, covariance) if vote is None else elected(counts, means, list(scatters), vote)
    )
    x, y = virtual_features(*merged, samples, rng)
    linear = linear_of(classifier)
    with torch.random.fork_rng(devices=[]):
        seed_torch(int(rng.integers(2**62)))
        fit(linear, x, y, Local(epochs=1, lr=local.lr, batch=local.batch, last="kept"))
    return state_of(linear)
