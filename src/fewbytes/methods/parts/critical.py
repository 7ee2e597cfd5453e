"""Critical values, whose removal would change the loss most: selection, overlap between clients, and aggregation of
uploads that hold only critical values. The equations are FedPURIN's; FedCAC shares some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fewbytes.base.errors import MethodError
from fewbytes.base.state import EntryMeans, State
from fewbytes.core.aggregation import VOTERS
from fewbytes.core.network import Vote

WORDS_AT_ONCE = 1 << 17  # 64-bit words of all masks compared at a time: a megabyte stays in the cache


def scores(theta: Tensor, gradient: Tensor, hessian: bool = False) -> Tensor:
    """Eq. 7: |-g theta + (g theta)^2 / 2|, or |g theta| without the second-order term; non-finite scores count as 0."""
    p = gradient * theta
    c = (p.square() / 2 - p).abs() if hessian else p.abs()
    return c.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def critical(score: Tensor, tau: float, cutoff: float = 1e-10, least: float | None = None) -> Tensor:
    """Eq. 8: true at the floor(tau d) largest scores of a layer of d elements, including ties at the threshold.

    A threshold of at most `cutoff` becomes the smallest score above `least` (default: `cutoff`), if there is one.
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
    """Raises MethodError for a mask of other entries, or with more than floor(tau d) ones in an entry, unless all d are
    ones: all scores are 0, and tie, in a layer that does not affect the loss. In half precision, with its many ties,
    twice as many are allowed."""
    if mask.keys() != set(names):
        raise MethodError("its mask is not of the shared entries")
    for name, of in mask.items():
        most = int(tau * of.numel()) * (1 if model.get_parameter(name).itemsize > 2 else 2)
        if most < (ones := int(of.count_nonzero())) < of.numel():
            raise MethodError(
                f"its mask has {ones} ones of {of.numel()} in {name!r}, more than the fraction tau={tau:g}"
            )


def packed(mask: State) -> NDArray[np.uint8]:
    """A mask's entries concatenated, eight per byte, highest bit first."""
    return np.packbits(np.concatenate([m.numpy().reshape(-1) for m in mask.values()]))


def overlap(masks: Iterable[State]) -> NDArray[np.float64]:
    """O_ij = 1 - sum |m_i - m_j| / (2 n_i) over all layers, shape (N, N), not symmetric; the diagonal is NaN.

    Rows of masks without ones are 0.
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
    """C_i as row i of a bool (N, N) table, i itself included: O_ij >= T(t); only i after round beta."""
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
    """Eq. 9 with a vote of the clients of C_i that sent a value; i's own value if they are too few."""
    votes: list[State] = [dict(upload) for upload in uploads]
    for name, first in uploads[0].items():
        values, sent = (torch.stack([state[name] for state in states]) for states in (uploads, masks))
        for i, row in enumerate(torch.from_numpy(group)):
            decided = sent[row].sum(0) >= VOTERS
            votes[i][name] = torch.where(decided, vote(values[row], sent[row]).to(first.dtype), uploads[i][name])
    return votes


def sparse_vote(uploads: Sequence[State], masks: Sequence[State], vote: Vote) -> State:
    """Eq. 10 with a vote of the clients that sent a value, times their fraction of all; 0 if they are too few."""
    mean: State = {}
    for name, first in uploads[0].items():
        values, sent = (torch.stack([state[name] for state in states]) for states in (uploads, masks))
        count = sent.sum(0)
        mean[name] = torch.where(count >= VOTERS, vote(values, sent) * count / len(uploads), 0.0).to(first.dtype)
    return mean


def combine(delta: State, mean: State, mask: State) -> State:
    """Eq. 11: delta where critical, the mean elsewhere; without delta, zero where critical."""
    return {k: torch.where(mask[k], delta.get(k, torch.zeros(())), mean[k]) for k in mean}
