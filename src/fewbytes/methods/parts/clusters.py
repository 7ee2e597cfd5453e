"""Finds clusters of clients whose data span similar subspaces, and the cluster nearest to a newcomer; after PACFL:
Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin, "Efficient Distribution Similarity Identification in Clustered
Federated Learning via Principal Angles between Client Data Subspaces", AAAI 2023.

Every client sends the first left singular vectors of its samples; the server clusters the clients by K-means or
hierarchically.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.extras import needs
from fewbytes.base.ranges import EXACT
from fewbytes.base.streams import stream_seed
from fewbytes.core.network import Network, Refused
from fewbytes.core.problem import Id, Problem
from fewbytes.core.site import Site
from fewbytes.data.named import one_tensor
from fewbytes.wire import Dense, payload

Similarity = Literal["projections", "vectors"]
"""Similarity of subspaces, or of the singular vectors themselves."""
Grouping = Literal["k-means", "hierarchical"]
"""The clustering algorithm: k-means as in GENE-FL, or hierarchical as in PACFL."""


@payload
class Subspace:
    """Client to server: U_i (f, d), the first left singular vectors of its samples as columns; a sample's shape."""

    vectors: Annotated[Dense, EXACT]
    shape: list[int]

    @property
    def columns(self) -> Tensor:
        return self.vectors.state[""]


def check_clusters(problem: Problem, clusters: int, vectors: int, grouping: Grouping = "k-means") -> None:
    """Raises UserError for a problem whose clients cannot be clustered this way, or if a package is missing."""
    if clusters > 1:
        needs(f"{grouping} clustering", "clusters", "sklearn" if grouping == "k-means" else "scipy")
    there = len(problem.clients_in(1))
    if clusters > there:
        raise UserError(
            f"clusters is {clusters}, more than the {there} clients at the start: set clusters={there} or less"
        )
    features = math.prod(one_tensor(problem.sample).shape[1:]) if problem.sample is not None else vectors
    if clusters > 1 and vectors > features:
        raise UserError(f"vectors is {vectors}, more than the {features} features of a sample")


def described(site: Site, vectors: int) -> Subspace:
    """A client's subspace. Raises UserError for samples that are not finite."""
    x = site.tensors(site.train)[0]
    if not x.isfinite().all():
        raise UserError(f"client {site.me} has samples that are not finite numbers (NaN?): correct or remove them")
    return Subspace(Dense({"": subspace(x, vectors)}), list(x.shape[1:]))


def spanned_by(vectors: int) -> Callable[[Id, Subspace], None]:
    """A check for `Network.call`: `vectors` vectors of norm at most 1, matching the sample shape in the same reply."""

    def check(client: Id, reply: Subspace) -> None:
        columns = reply.vectors.state.get("", torch.empty(0))
        right = columns.shape == (math.prod(reply.shape), vectors) and columns.is_floating_point()
        if not right or len(reply.vectors.state) != 1 or float(columns.norm(dim=0).max()) > 1 + 1e-3:
            raise MethodError(f"its subspace is not {vectors} unit vectors of samples of shape {reply.shape[:8]}")

    return check


def of_one_shape(replies: Iterable[tuple[Id, Subspace]], problem: Problem) -> dict[Id, Subspace]:
    """The clients' subspaces. Raises UserError, as it reads them, if samples of one have another shape."""
    found: dict[Id, Subspace] = {}
    shape = None if problem.sample is None else problem.sample_shape
    for client, reply in replies:
        shape, its = shape or tuple(reply.shape), tuple(reply.shape)
        if its != shape:
            raise UserError(f"client {client}'s samples have shape {its}, the others' {shape}: all must be equal")
        found[client] = reply
    return found


def clusters_of(
    subspaces: Mapping[Id, Subspace], clusters: int, similarity: Similarity, grouping: Grouping, net: Network
) -> dict[Id, int]:
    """The cluster of each present client; those that did not answer join the largest. Raises UserError."""
    if clusters == 1:
        return dict.fromkeys(net.clients, 0)
    if len(subspaces) < clusters:
        raise UserError(f"clusters is {clusters}, but only {len(subspaces)} clients are present: lower it")
    clients = sorted(subspaces)
    columns = [subspaces[i].columns for i in clients]
    points = embedding(columns) if similarity == "projections" else torch.stack([u.T.flatten() for u in columns])
    if grouping == "hierarchical":
        groups = hierarchical(points, clusters)
    else:
        groups = k_means(points, clusters, stream_seed(net.problem.seed, "clusters"))
    found = dict(zip(clients, groups, strict=True))
    if silent := [i for i in net.clients if i not in found]:
        found |= dict.fromkeys(silent, Counter(groups).most_common(1)[0][0])
        net.note("clients that were silent at the start are in the largest cluster", f"{len(silent)} clients")
    return found


def nearest(
    new: Subspace, subspaces: Mapping[Id, Subspace], cluster_of: Mapping[Id, int], similarity: Similarity
) -> int:
    """Eq. 12 of GENE-FL: the cluster nearest to a newcomer. Raises Refused if its samples have another shape."""
    members: dict[int, list[Tensor]] = {}
    for i, known in subspaces.items():
        members.setdefault(cluster_of[i], []).append(known.columns)
    shape = next(iter(subspaces.values())).shape
    if new.shape != shape:
        raise Refused(f"its samples have shape {tuple(new.shape)}, the known clients' {tuple(shape)}")
    away = {k: subspace_distance(new.columns, columns, similarity) for k, columns in sorted(members.items())}
    return min(away, key=lambda k: away[k])


def subspace(samples: Tensor, vectors: int) -> Tensor:
    """U_i (f, d), float32: the first d left singular vectors of the samples (m, …) as columns of (f, m), uncentred.

    In every column the entry of largest magnitude (the first of equal ones) is positive. Directions the samples lack
    (fewer samples than d, or constant features) are columns of zeros, orthogonal to all others.
    """
    columns = samples.flatten(1).T.double().cpu()
    u, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    there = sizes > sizes.max().clamp(min=1e-300) * max(columns.shape) * torch.finfo(torch.float64).eps
    u = (u * there)[:, :vectors]
    signs = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()
    full = torch.zeros(len(columns), vectors, dtype=torch.float64)
    full[:, : u.shape[1]] = u * signs
    return full.to(torch.promote_types(samples.dtype, torch.float32))


def likeness(first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """||U_i^T U_j||_F^2 for two lists of subspaces, float64 (n, m): sums of squared cosines of principal angles."""
    a, b = (torch.stack(list(us)).double() for us in (first, second))
    cosines = a.permute(0, 2, 1).flatten(0, 1) @ b.permute(1, 0, 2).flatten(1)
    return cosines.view(len(a), a.shape[2], len(b), b.shape[2]).square().sum((1, 3))


def embedding(subspaces: Sequence[Tensor]) -> Tensor:
    """Points (n, n) whose distances are the Frobenius distances of the projections U U^T."""
    values, directions = torch.linalg.eigh(likeness(subspaces, subspaces))
    points: Tensor = directions * values.clamp(min=0).sqrt()
    return points


def subspace_distance(own: Tensor, members: Sequence[Tensor], similarity: str = "projections") -> float:
    """Eq. 12: the distance of a subspace (f, d) to a cluster's mean projection U U^T, or mean vectors."""
    if similarity == "vectors":
        return float((own.double() - torch.stack(list(members)).double().mean(0)).norm())
    square = likeness([own], [own]).sum() - 2 * likeness([own], members).mean() + likeness(members, members).mean()
    return float(square.clamp(min=0).sqrt())


def k_means(points: Tensor, clusters: int, seed: int) -> list[int]:
    """The cluster of each point (n, …): k-means++ with 10 starts; clusters are numbered as they first appear."""
    from sklearn.cluster import KMeans  # slow to import
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than clusters: some stay empty
        found = KMeans(clusters, n_init=10, random_state=seed % 2**32).fit(points.numpy()).labels_
    return numbered(found)


def hierarchical(points: Tensor, clusters: int) -> list[int]:
    """The cluster of each point (n, …), n at least 2. The two clusters with the smallest mean distance of points are
    merged until `clusters` remain; they are numbered as they first appear."""
    from scipy.cluster.hierarchy import cut_tree, linkage  # slow to import

    return numbered(cut_tree(linkage(points.double().numpy(), "average"), clusters).ravel())


def numbered(labels: Iterable[int]) -> list[int]:
    """The clusters' labels as numbers from 0, in the order in which they first appear."""
    order: dict[int, int] = {}
    return [order.setdefault(int(label), len(order)) for label in labels]
