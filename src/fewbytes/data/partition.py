"""The papers' partitions as index functions on labels.

Every function returns one int64 index array per client. `rng` is a legacy `numpy.random.RandomState`, as in the papers'
released code, so that the same seed gives the same split.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from fewbytes.base.errors import UserError, suggestion

log = logging.getLogger(__name__)

Indices = NDArray[np.int64]

TRIES = 1000


def dirichlet(labels: Indices, clients: int, alpha: float, rng: RandomState, min_samples: int = 10) -> list[Indices]:
    """Split each class by shares ~ Dir(alpha); a client that already has n / clients samples gets none.

    Disjoint and exhaustive; redrawn until every client has `min_samples`. Source: DENSE (Zhang et al. 2022), used by
    FuseFL unchanged and by FedKTL ("practical setting") with min_samples 1. Raises UserError if TRIES draws fail.
    """
    for _ in range(TRIES if clients * min_samples <= len(labels) else 0):
        given = _split_classes(labels, clients, alpha, rng)
        if given and min(sum(map(len, part)) for part in given) >= min_samples:
            return _shuffled(given, rng)
    raise _too_few(len(labels), clients, alpha, min_samples)


def quantity(labels: Indices, clients: int, alpha: float, rng: RandomState, min_samples: int = 10) -> list[Indices]:
    """Random subsets of unequal sizes: clients' shares of the samples are drawn from Dir(alpha).

    Disjoint and exhaustive; redrawn until every client has `min_samples`. Source: NIID-Bench (Li et al. 2022), quantity
    skew. Raises UserError if TRIES draws fail.
    """
    for _ in range(TRIES if clients * min_samples <= len(labels) else 0):
        shares = rng.dirichlet(np.full(clients, alpha))
        parts = _cut(rng.permutation(len(labels)), shares) if np.isfinite(shares).all() else [labels[:0]]
        if min(map(len, parts)) >= min_samples:
            return parts
    raise _too_few(len(labels), clients, alpha, min_samples)


def _too_few(samples: int, clients: int, alpha: float, min_samples: int) -> UserError:
    return UserError(
        f"no partition of {samples} samples with alpha {alpha} leaves each of {clients} clients at least "
        f"{min_samples} samples; raise alpha, use fewer clients or more samples"
    )


def _split_classes(labels: Indices, clients: int, alpha: float, rng: RandomState) -> list[list[Indices]]:
    """One draw: each client's piece of every class; empty if alpha is so small that shares vanish numerically."""
    counts = np.zeros(clients, dtype=np.int64)
    pieces = []
    for members in _by_class(labels):
        rng.shuffle(members)
        share = rng.dirichlet(np.full(clients, alpha)) * (counts < len(labels) / clients)
        if not share.sum() > 0:
            return []
        pieces.append(_cut(members, share / share.sum()))
        counts += [len(piece) for piece in pieces[-1]]
    return [list(part) for part in zip(*pieces, strict=True)]


def dirichlet_fixed(
    labels: Indices, clients: int, alpha: float, samples: int, seed: int, classes: Sequence[int] | None = None
) -> list[Indices]:
    """Every client draws exactly `samples` samples, class shares q ~ Dir(alpha), one q per client.

    Clients draw independently, so they may share samples. A class is drawn with replacement only if it has too few
    samples. q depends only on seed, clients, alpha and the number of `classes` (default: 0 to the highest label), so
    training and test splits of one seed have the same shares. Source: FedPURIN's released code. Raises UserError if a
    class to be drawn has no sample.
    """
    classes = range(int(labels.max()) + 1) if classes is None else classes
    pools = [np.flatnonzero(labels == c) for c in classes]
    rng = RandomState(seed)
    shares = rng.dirichlet(np.full(len(pools), alpha), size=clients)
    if not np.isfinite(shares).all():
        raise UserError(f"alpha {alpha} is too small to draw shares from; raise it")
    parts = []
    for share in shares:
        part, left = [], samples
        for k, pool in enumerate(pools):
            wanted = left if k == len(pools) - 1 else min(math.floor(samples * share[k] + 0.5), left)
            if wanted and not len(pool):
                raise UserError(
                    f"class {classes[k]} has no sample to draw from; use a data set with all classes in every split"
                )
            part.append(rng.choice(pool, wanted, replace=wanted > len(pool)))
            left -= wanted
        parts.append(np.concatenate(part))
    return parts


def pathological(labels: Indices, clients: int, classes_per_client: int, rng: RandomState) -> list[Indices]:
    """Each client gets samples of `classes_per_client` classes; samples are disjoint.

    Classes in order go to the first ceil(clients * classes_per_client / classes) clients that still lack classes. All
    of these but the last get a random number between a tenth of and the full equal share, the last gets the rest. If
    the numbers do not divide, the last clients get fewer classes, and classes that no client lacks are dropped with a
    warning. Source: FedKTL's released code (PFLlib). Raises UserError if a class has fewer samples than clients, or
    `classes_per_client` is not in 1..classes.
    """
    pools = _by_class(labels)
    if not 1 <= classes_per_client <= len(pools):
        raise UserError(
            f"classes per client is {classes_per_client}; it must lie in 1..{len(pools)}, the classes there are"
        )
    takers_per_class = math.ceil(clients * classes_per_client / len(pools))
    lacking = np.full(clients, classes_per_client)
    given: list[list[Indices]] = [[] for _ in range(clients)]
    for pool in pools:
        takers = np.flatnonzero(lacking)[:takers_per_class]
        label = labels[pool[0]]
        if not len(takers):
            log.warning("pathological partition: every client has its classes, so class %d is dropped", label)
            continue
        equal = len(pool) // len(takers)
        if not equal:
            raise UserError(f"class {label} has {len(pool)} samples for {len(takers)} clients; use fewer clients")
        sizes = rng.randint(max(1, equal // 10), equal + 1, size=len(takers) - 1)
        rng.shuffle(pool)
        for client, piece in zip(takers, np.split(pool, np.cumsum(sizes)), strict=True):
            given[client].append(piece)
        lacking[takers] -= 1
    return _shuffled(given, rng)


def shards(labels: Indices, clients: int, shards_per_client: int, rng: RandomState) -> list[Indices]:
    """Cut samples sorted by label into clients * shards_per_client nearly equal shards, assigned at random.

    Disjoint and exhaustive; a client has about `shards_per_client` classes. Source: McMahan et al. 2017, as used by
    GENE-FL. Raises UserError if there are more shards than samples.
    """
    number = clients * shards_per_client
    if not 1 <= number <= len(labels):
        raise UserError(
            f"{clients} clients of {shards_per_client} shards cannot be cut from {len(labels)} samples; change them"
        )
    pieces = np.array_split(np.argsort(labels, kind="stable"), number)
    order = rng.permutation(number).reshape(clients, shards_per_client)
    return _shuffled([[pieces[i] for i in mine] for mine in order], rng)


def main_category(labels: Indices, clients: int, share: float, rng: RandomState) -> list[Indices]:
    """Equal numbers of samples: a `share` from a client's main classes, the rest equally from all others.

    A client's main classes are the i-th of `clients` blocks of consecutive classes; with fewer classes than clients,
    several clients share one. The rest of a class is divided equally among the other clients, remainders starting with
    the client after its owner. Disjoint and exhaustive. Source: Fed-KGF (Li et al. 2024). If class sizes differ too
    much for equal numbers and the share, numbers stay equal and a warning states the share reached.
    """
    pools = _by_class(labels)
    for pool in pools:
        rng.shuffle(pool)
    sizes = np.array([len(part) for part in np.array_split(labels, clients)])
    if len(pools) < clients:
        blocks = [np.array([i * len(pools) // clients]) for i in range(clients)]
    else:
        blocks = np.array_split(np.arange(len(pools)), clients)
    given: list[list[Indices]] = [[] for _ in range(clients)]
    room = sizes.copy()

    def take(client: int, c: int, number: int) -> None:
        number = max(0, min(number, room[client], len(pools[c])))
        given[client].append(pools[c][:number])
        pools[c], room[client] = pools[c][number:], room[client] - number

    left, owners = np.array([len(pool) for pool in pools]), np.bincount(np.concatenate(blocks))
    for i, block in enumerate(blocks):
        wanted = np.cumsum([0, *left[block]]) * (share * sizes[i] / left[block].sum())
        for c, number in zip(block, np.diff(np.rint(wanted).astype(int)), strict=True):
            take(i, c, min(number, left[c] // owners[c]))
    reached, lacking = 1 - room / sizes, np.array([len(pools) - len(block) for block in blocks])
    for c in range(len(pools)):
        mine = [i for i, block in enumerate(blocks) if c in block]
        others = [i % clients for i in range(mine[-1] + 1, mine[-1] + 1 + clients) if i % clients not in mine]
        each, over = divmod(len(pools[c]), len(others) or 1)
        place = int(np.flatnonzero(blocks[mine[-1]] == c)[0]) * over
        for k in range(len(others)):
            i = others[(place + k) % len(others)]
            take(i, c, min(each + (k < over), math.ceil(room[i] / lacking[i])))
            lacking[i] -= 1
    for i in range(clients):  # samples not yet assigned
        for c in range(len(pools)):
            take(i, c, len(pools[c]))
    if reached.min() < share - 0.01:
        log.warning(
            "main-category partition: main classes are %.0f to %.0f %% of clients' samples, not %.0f",
            100 * reached.min(),
            100 * reached.max(),
            100 * share,
        )
    return _shuffled(given, rng)


def iid(labels: Indices, clients: int, rng: RandomState) -> list[Indices]:
    """Random subsets whose sizes differ by at most one; classes are not balanced. Disjoint and exhaustive."""
    return np.array_split(rng.permutation(len(labels)), clients)


def balanced(labels: Indices, clients: int, rng: RandomState, shots: int | None = None) -> list[Indices]:
    """Give all clients equal numbers of samples per class: `shots` if given, else as many as possible, plus remainders.

    Without `shots`, clients differ by at most one sample in a class and in all, and the split is exhaustive. Disjoint.
    Source: Fed-KGF (Li et al. 2024); with `shots` FedKTL's client of few samples (Zhang et al. 2024). Raises UserError
    if a class has too few samples for the shots.
    """
    pools = _by_class(labels)
    for pool in pools:
        if shots is not None and len(pool) < clients * shots:
            raise UserError(
                f"class {labels[pool[0]]} has {len(pool)} samples, too few for {shots} shots of {clients} clients: "
                "lower shots, or use fewer clients"
            )
    drawn = np.concatenate([rng.permutation(pool)[: None if shots is None else clients * shots] for pool in pools])
    return _shuffled([[drawn[i::clients]] for i in range(clients)], rng)


def match_test(
    train_labels: Indices, parts: Sequence[Indices], test_labels: Indices, rng: RandomState
) -> list[Indices]:
    """Split each class of the test set by the clients' shares of that class in training.

    Disjoint; a class without training samples is dropped, and a client with few samples may get none. Source: FuseFL's
    released code: shuffled test indices of a class cut at floor(cumsum(share) * n_test).
    """
    classes = 1 + max(int(train_labels.max()), int(test_labels.max(initial=0)))
    counts = np.array([np.bincount(train_labels[part], minlength=classes) for part in parts])
    given: list[list[Indices]] = [[] for _ in parts]
    for members in _by_class(test_labels):
        rng.shuffle(members)
        column = counts[:, test_labels[members[0]]]
        if column.sum():
            for part, piece in zip(given, _cut(members, column / column.sum()), strict=True):
                part.append(piece)
    return _shuffled(given, rng)


def held_classes(
    train_labels: Indices, parts: Sequence[Indices], test_labels: Indices, rng: RandomState
) -> list[Indices]:
    """Each client tests on all test samples of its training classes, shuffled; clients share samples.

    Source: PACFL (Vahidian et al. 2023), on which GENE-FL is based.
    """
    return [rng.permutation(np.flatnonzero(np.isin(test_labels, train_labels[part]))) for part in parts]


def flower(labels: Indices, partitioner: Any) -> list[Indices]:
    """The subsets of any flwr-datasets partitioner, built with `partition_by="label"` if it has that option.

    The partitioner gets a table of labels and row numbers only; no network is used. Raises UserError if flwr-datasets
    is missing or the partitioner fails on these labels.
    """
    try:
        import datasets
    except ImportError as error:
        raise _no_flower() from error
    try:
        partitioner.dataset = datasets.Dataset.from_dict({"label": labels, "row": np.arange(len(labels))})
        parts = [partitioner.load_partition(i) for i in range(partitioner.num_partitions)]
    except Exception as error:  # partitioners check their options only here, with many exception types
        raise UserError(f"{type(partitioner).__name__} cannot split these labels: {_line(error)}") from error
    return [np.asarray(part["row"], dtype=np.int64) for part in parts]


def flower_by_name(name: str, clients: int, alpha: float, seed: int, options: dict[str, Any]) -> Any:
    """The flwr-datasets partitioner `name` with its `options`. Raises UserError for an option it does not have."""
    try:
        from flwr_datasets import partitioner as module
    except ImportError as error:
        raise _no_flower() from error
    names = [n for n in module.__all__ if n.endswith("Partitioner") and n != "Partitioner"]
    if name not in names:
        raise UserError(
            f"flwr-datasets has no partitioner {name!r}{suggestion(name, names)}; it has {', '.join(names)}"
        )
    kind = getattr(module, name)
    takes = inspect.signature(kind).parameters
    known = {"num_partitions": clients, "partition_by": "label", "alpha": alpha, "seed": seed}
    try:
        return kind(**({key: value for key, value in known.items() if key in takes} | options))
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} does not accept these options: {_line(error)}; it takes {', '.join(takes)}") from error


def _by_class(labels: Indices) -> list[Indices]:
    return [np.flatnonzero(labels == c) for c in np.unique(labels)]


def _cut(members: Indices, shares: NDArray[np.float64]) -> list[Indices]:
    """`members` cut at floor(cumsum(shares) * n); the last piece gets the remainder."""
    return np.split(members, (np.cumsum(shares) * len(members)).astype(np.int64)[:-1])


def _shuffled(given: Sequence[Sequence[Indices]], rng: RandomState) -> list[Indices]:
    """Each client's pieces joined and shuffled, client by client."""
    parts = [np.concatenate([np.empty(0, np.int64), *pieces]) for pieces in given]
    for part in parts:
        rng.shuffle(part)
    return parts


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _no_flower() -> UserError:
    return UserError(
        "partitions of flwr-datasets need that package; install it with: pip install 'fewbytes[flower-datasets]'"
    )
