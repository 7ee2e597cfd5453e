"""Robust aggregation rules: alternatives to the mean of clients' states that tolerate some malicious clients.

The rules are pure functions of a list of states, named tensors of the same shapes. Sums are in float64; results have
the entries' own types. A state as a vector excludes its counters (integers). Krum takes counters of whole states, the
trimmed mean trims them; other rules use their rounded median. Replies are added in the order clients were asked, so
results do not depend on arrival order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fewbytes.base.errors import MethodError
from fewbytes.base.state import State
from fewbytes.core.policy import TooFewReplies
from fewbytes.core.rules import ENTRY_RULES, Rule

SMOOTHING = 1e-6  # nu of RFA
ITERATIONS = 100  # maximum, of Weiszfeld's algorithm
VOTERS = 3  # minimum for a vote: of two voters, a malicious one would have half of the vote
CLOSE = 1e-6  # convergence: no client's share changes by more, relatively


def median(states: Sequence[State]) -> State:
    """The median of every coordinate: Yin, Chen, Kannan, Bartlett, "Byzantine-Robust Distributed Learning: Towards
    Optimal Statistical Rates", ICML 2018, Definition 1. For an even number, the mean of the middle two."""
    n = len(states)
    return _by_coordinate(states, lambda ordered: (ordered[(n - 1) // 2] + ordered[n // 2]) / 2)


def trimmed_mean(states: Sequence[State], part: float) -> State:
    """The mean of every coordinate without a fraction `part` of values at either end: Yin et al. 2018, Definition 2.
    The number removed is rounded up, but at least one value stays."""
    n = len(states)
    cut = min(math.ceil(part * n - 1e-9), (n - 1) // 2)
    return _by_coordinate(states, lambda ordered: ordered[cut : n - cut].mean(0))


def krum_scores(states: Sequence[State], malicious: int) -> Tensor:
    """s(i) of Krum, (n,): the sum of squared distances of a state to its n - f - 2 nearest others. Blanchard, El
    Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS
    2017."""
    distances = squared_distances(states).fill_diagonal_(math.inf)
    return distances.sort(1).values[:, : len(states) - malicious - 2].sum(1)


def krum(states: Sequence[State], malicious: int) -> State:
    """The state with the lowest score; the first of equal ones."""
    return states[int(krum_scores(states, malicious).argmin())]


def multi_krum(states: Sequence[State], malicious: int) -> State:
    """The plain mean of the m = n - f states with the lowest scores (Blanchard et al. 2017, Multi-Krum)."""
    chosen = krum_scores(states, malicious).argsort(stable=True)[: len(states) - malicious].sort().values.tolist()
    return weighted_mean([states[i] for i in chosen], [1.0] * len(chosen))


def geometric_median(states: Sequence[State], weights: Sequence[float]) -> State:
    """The point with the least weighted sum of distances to the states: Pillutla, Kakade, Harchaoui, "Robust
    Aggregation for Federated Learning", IEEE TSP 2022, by its smoothed Weiszfeld algorithm.

    In the paper an iteration is an exchange, and 3 start from the mean. Here iterations are free: at most 100 from the
    median, until no client's share changes by a millionth. In the first, clients nearer than the median distance weigh
    the same: else the iteration would stay at a client that is the median.
    """
    point, alpha = median(states), torch.tensor(weights, dtype=torch.float64)
    parts, nearest = torch.ones_like(alpha), 0.0
    for _ in range(ITERATIONS):
        away = torch.tensor([update_norm(state, point) for state in states], dtype=torch.float64)
        nearest = SMOOTHING if nearest else max(SMOOTHING, float(away.quantile(0.5)))
        beta = alpha / away.clamp(min=nearest)
        before, parts = parts, beta / beta.sum()
        point = _in_parts(states, parts)
        if float((parts / before - 1).abs().max()) <= CLOSE:
            break
    return point


def norm_clipped(states: Sequence[State], around: Mapping[str, Tensor], largest: float | None = None) -> list[State]:
    """The states after scaling updates by min(1, M / norm): Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor
    Federated Learning?", 2019. M is `largest`, by default the median of these updates' norms.

    An update is a state's difference to `around`; entries missing there count from 0. Running statistics move so much
    more than weights that they would dominate a norm: they are clipped separately, to the median of theirs. A state
    that needs no clipping is returned as the same object.
    """
    return _apart(states, largest, lambda part, most: _clipped(part, around, most, [1.0] * len(part)))


def evenly_clipped(states: Sequence[State], around: Mapping[str, Tensor], largest: float | None = None) -> list[State]:
    """`norm_clipped` for states with different entries. An update's norm is divided by the square root of its number of
    values: a client with part of the model moves it no further than others move theirs. Without values it is
    unchanged."""

    def even(part: Sequence[State], most: float | None) -> list[State]:
        return _clipped(part, around, most, [math.sqrt(_values(state)) for state in part])

    return _apart(states, largest, even)


def _apart(
    states: Sequence[State], largest: float | None, clip: Callable[[Sequence[State], float | None], list[State]]
) -> list[State]:
    """Apply `clip` to learnt entries and to running statistics separately, each among the clients that sent any."""
    found: list[State] = [dict(state) for state in states]
    changed: set[int] = set()
    for statistics in (False, True):
        parts = [{n: v for n, v in state.items() if is_statistic(n) == statistics} for state in states]
        with_values = [i for i, part in enumerate(parts) if _values(part)]
        for i, new in zip(
            with_values, clip([parts[i] for i in with_values], None if statistics else largest), strict=True
        ):
            if new is not parts[i]:
                found[i] |= new
                changed.add(i)
    return [found[i] if i in changed else state for i, state in enumerate(states)]


def _clipped(
    states: Sequence[State], around: Mapping[str, Tensor], largest: float | None, units: Sequence[float]
) -> list[State]:
    """Updates, with norms in these units, clipped to `largest` or the median."""
    norms = [update_norm(state, around) / unit for state, unit in zip(states, units, strict=True)]
    if largest is None:
        largest = float(torch.tensor(norms, dtype=torch.float64).quantile(0.5)) if norms else 0.0
    return [
        state if norm <= largest else {n: _moved(value, around.get(n), largest / norm) for n, value in state.items()}
        for state, norm in zip(states, norms, strict=True)
    ]


def is_statistic(name: str) -> bool:
    """Whether an entry is a running statistic of batch normalisation."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def _values(state: Mapping[str, Tensor]) -> int:
    return sum(value.numel() for value in state.values() if value.is_floating_point())


def vote(values: Tensor, sent: Tensor, part: float | None = None) -> Tensor:
    """For every coordinate of `values` (n, …), the median over the clients with `sent` (n, …), bool; with `part`, the
    mean without a fraction `part` at either end, as `trimmed_mean`; 0 if nobody sent it. In float64."""
    ordered = torch.where(sent, values.double(), math.inf).sort(0).values
    count = sent.sum(0, keepdim=True)
    if part is None:
        low, high = ((count - 1) // 2).clamp(min=0), (count // 2).clamp(max=len(values) - 1)
        return torch.where(count > 0, (ordered.gather(0, low) + ordered.gather(0, high)) / 2, 0.0)[0]
    cut = torch.minimum((part * count - 1e-9).ceil(), ((count - 1) // 2).clamp(min=0))
    rank = torch.arange(len(values)).view(-1, *[1] * (values.dim() - 1))
    kept = (rank >= cut) & (rank < count - cut)
    return torch.where(kept, ordered, 0.0).sum(0) / kept.sum(0).clamp(min=1)


def _moved(value: Tensor, start: Tensor | None, part: float) -> Tensor:
    """The point a fraction `part` of the way from `start` (None: 0) to a value; counters are returned as they are."""
    if not value.is_floating_point():
        return value
    start = torch.zeros(()) if start is None else start
    return (start + part * (value.double() - start)).to(value.dtype)


def weighted_mean(states: Sequence[State], weights: Sequence[float]) -> State:
    """The weighted mean; for counters the median."""
    parts = torch.tensor(weights, dtype=torch.float64)
    return _in_parts(states, parts / parts.sum())


def update_norm(state: Mapping[str, Tensor], around: Mapping[str, Tensor]) -> float:
    """The norm of a state's difference to `around`, without counters."""
    changes = (value.double() - around.get(name, 0) for name, value in state.items() if value.is_floating_point())
    return math.sqrt(sum(float(change.square().sum()) for change in changes))


def squared_distances(states: Sequence[State]) -> Tensor:
    """The squared Euclidean distances (n, n) between states as vectors, in float64, without counters."""
    products = torch.zeros(len(states), len(states), dtype=torch.float64)
    for name, first in states[0].items():
        if first.is_floating_point():
            rows = torch.stack([state[name].double().reshape(-1) for state in states])
            products += rows @ rows.T
    squares = products.diagonal()
    return (squares[:, None] + squares[None] - 2 * products).clamp(min=0)


def _typed(value: Tensor, like: Tensor) -> Tensor:
    return (value if like.is_floating_point() else value.round()).to(like.dtype)


def _by_coordinate(states: Sequence[State], of: Callable[[Tensor], Tensor]) -> State:
    """Apply `of` to the values of every coordinate, in ascending order (n, …)."""
    return {
        name: _typed(of(torch.stack([state[name].double() for state in states]).sort(0).values), first)
        for name, first in states[0].items()
    }


def _in_parts(states: Sequence[State], parts: Tensor) -> State:
    """The sum of the states in proportions `parts` (n,); for counters the median."""
    total: State = {}
    for name, first in states[0].items():
        if first.is_floating_point():
            value = torch.zeros(first.shape, dtype=torch.float64)
            for part, state in zip(parts.tolist(), states, strict=True):
                if part:
                    value.add_(state[name].double(), alpha=part)
            total[name] = value.to(first.dtype)
    return total | median([{name: value for name, value in s.items() if name not in total} for s in states])


class RobustMean:
    """Replaces `Mean` and `EntryMeans` in runs with another rule; keeps all added states in memory.

    `around`: the clients' message, from which updates count. `refused`: returns the number of clients whose replies
    were refused; Krum tolerates one malicious client fewer for each. `few`: an entry may have few senders, or one, too
    few for a vote; so any rule first clips updates evenly. Raises the errors of those classes, and TooFewReplies if the
    rule needs more replies.
    """

    def __init__(
        self,
        rule: Rule,
        around: Mapping[str, Tensor] | None = None,
        refused: Callable[[], int] = lambda: 0,
        few: bool = False,
    ) -> None:
        self.rule, self.around, self._refused, self._few = rule, around or {}, refused, few
        self._states: list[State] = []
        self._weights: list[float] = []

    def add(self, state: Mapping[str, Tensor], weight: float = 1.0) -> None:
        """Add one client's state; median, trimmed mean and Krum ignore its `weight`, which is above 0."""
        if not weight > 0:
            raise MethodError(f"a mean needs weights above 0, got {weight}")
        self._states.append(dict(state))
        self._weights.append(float(weight))

    def __call__(self) -> State:
        """The aggregate in place of the mean. All states must have the same entries."""
        if not self._states:
            raise MethodError("nothing to average: no client replied")
        first = self._states[0]
        differ = {
            name
            for state in self._states[1:]
            for name in first.keys() | state.keys()
            if name not in first or name not in state or first[name].shape != state[name].shape
        }
        if differ:
            raise MethodError(
                f"{self.rule.name} needs the same entries in every state; these differ: {', '.join(sorted(differ))}"
            )
        return self._together(self._clipped(self._states), self._weights)

    def over(self, old: State) -> State:
        """`old` with each entry replaced by the aggregate over the clients that sent it, if any."""
        names = dict.fromkeys(name for state in self._states for name in state)
        if unknown := names.keys() - old.keys():
            raise MethodError(f"a client sent entries the server does not share: {', '.join(sorted(unknown)[:3])}")
        if all(state.keys() == names.keys() for state in self._states):
            return old | self() if self._states else dict(old)
        if self.rule.name not in ENTRY_RULES:
            raise MethodError(
                f"{self.rule.name} needs the same entries in every state, and clients sent different ones"
            )
        states, new = self._clipped(self._states), dict(old)
        for name in names:
            own = [(s, w) for s, w in zip(states, self._weights, strict=True) if name in s]
            new |= self._together([{name: s[name]} for s, _ in own], [w for _, w in own])
        return new

    def _clipped(self, states: list[State]) -> list[State]:
        """Clip first, as norms are of all entries that a client sent."""
        if self._few:
            return evenly_clipped(states, self.around, self.rule.largest)
        return norm_clipped(states, self.around, self.rule.number) if self.rule.name == "norm-clip" else states

    def _together(self, states: list[State], weights: list[float]) -> State:
        tolerating = self.rule.tolerating_fewer(self._refused())
        rule, number = tolerating.name, tolerating.number or 0
        if len(states) < tolerating.replies:
            raise TooFewReplies(
                f"aggregate {self.rule} needs {tolerating.replies} replies, and {len(states)} came: resume the run "
                f"when more can answer, or begin one with {self.rule.instead}"
            )
        if rule == "median":
            return median(states)
        if rule == "trimmed-mean":
            return trimmed_mean(states, number)
        if rule == "krum":
            return krum(states, int(number))
        if rule == "multi-krum":
            return multi_krum(states, int(number))
        if rule == "geometric-median":
            return geometric_median(states, weights)
        return weighted_mean(states, weights)  # the states were clipped before
