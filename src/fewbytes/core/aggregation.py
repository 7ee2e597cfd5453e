"""What a server may take instead of the mean of clients' states, so that some of them may lie.

The rules are pure functions of a list of states, named tensors of the same shapes. Sums are in float64; a result is of
the entries' own types. Counters (integers) are no part of a state as a vector; but for Krum, which takes a whole state,
and the trimmed mean they take their median, rounded. As replies are added in the order clients were asked, results are
the same in whatever order they came.
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
ITERATIONS = 100  # of Weiszfeld's algorithm at most
VOTERS = 3  # fewer hold no vote: of two, one that lies would have half of it
CLOSE = 1e-6  # it has ended where no client's part changes by more, relatively


def median(states: Sequence[State]) -> State:
    """The median of every coordinate: Yin, Chen, Kannan, Bartlett, "Byzantine-Robust Distributed Learning: Towards
    Optimal Statistical Rates", ICML 2018, Definition 1. Of an even number the mean of the two in the middle."""
    n = len(states)
    return _by_coordinate(states, lambda ordered: (ordered[(n - 1) // 2] + ordered[n // 2]) / 2)


def trimmed_mean(states: Sequence[State], part: float) -> State:
    """The mean of every coordinate without its largest and its smallest values, `part` of all at either end: Yin et al.
    2018, Definition 2. Their number is rounded up, but at least one value stays."""
    n = len(states)
    cut = min(math.ceil(part * n - 1e-9), (n - 1) // 2)
    return _by_coordinate(states, lambda ordered: ordered[cut : n - cut].mean(0))


def krum_scores(states: Sequence[State], malicious: int) -> Tensor:
    """s(i) of Krum, (n,): the squared distances of a state to the n - f - 2 others nearest to it, added up. Blanchard,
    El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS
    2017."""
    distances = squared_distances(states).fill_diagonal_(math.inf)
    return distances.sort(1).values[:, : len(states) - malicious - 2].sum(1)


def krum(states: Sequence[State], malicious: int) -> State:
    """The state of the lowest score; of equal ones the first."""
    return states[int(krum_scores(states, malicious).argmin())]


def multi_krum(states: Sequence[State], malicious: int) -> State:
    """The plain mean of the m = n - f states of the lowest scores (Blanchard et al. 2017, Multi-Krum)."""
    chosen = krum_scores(states, malicious).argsort(stable=True)[: len(states) - malicious].sort().values.tolist()
    return weighted_mean([states[i] for i in chosen], [1.0] * len(chosen))


def geometric_median(states: Sequence[State], weights: Sequence[float]) -> State:
    """The point of the least weighted sum of distances to the states: Pillutla, Kakade, Harchaoui, "Robust Aggregation
    for Federated Learning", IEEE TSP 2022, by its smoothed Weiszfeld algorithm.

    The paper, where an iteration is an exchange, has 3 from the mean; here they cost none: at most 100 from the median,
    until no client's part changes by a millionth. In the first those nearer than the median distance count alike, as a
    client that is the median would hold on to it.
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
    """The states with no update of more than the largest norm M, updates times min(1, M / norm): Sun, Kairouz, Suresh,
    McMahan, "Can You Really Backdoor Federated Learning?", 2019. M is by default the median of these updates' norms.

    An update is what a state adds to `around`; an entry that `around` lacks counts from 0. Running statistics move so
    much more than weights that they would be all of a norm: they are clipped apart, to the median of theirs. A state of
    which nothing is clipped is the same object.
    """
    return _apart(states, largest, lambda part, most: _clipped(part, around, most, [1.0] * len(part)))


def evenly_clipped(states: Sequence[State], around: Mapping[str, Tensor], largest: float | None = None) -> list[State]:
    """The same of states that may be of different entries: an update's norm is by the square root of its number of
    values, so that who sends a part of the model moves that no further than the others move theirs. One without
    values is as it was."""

    def even(part: Sequence[State], most: float | None) -> list[State]:
        return _clipped(part, around, most, [math.sqrt(_values(state)) for state in part])

    return _apart(states, largest, even)


def _apart(
    states: Sequence[State], largest: float | None, clip: Callable[[Sequence[State], float | None], list[State]]
) -> list[State]:
    """`clip` of what is learnt, and of running statistics, each among those that sent any."""
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
    """Updates, whose norms are in these units, no longer than `largest` or the median."""
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
    """Of every coordinate of `values` (n, …) the median over those that `sent` it (n, …), bool, or the mean of theirs
    without `part` of them at either end, as `trimmed_mean` has it; 0 where nobody did. In float64."""
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
    """A part of the way from `start` (none: 0) to a value; a counter as it is."""
    if not value.is_floating_point():
        return value
    start = torch.zeros(()) if start is None else start
    return (start + part * (value.double() - start)).to(value.dtype)


def weighted_mean(states: Sequence[State], weights: Sequence[float]) -> State:
    """The mean, but of counters the median."""
    parts = torch.tensor(weights, dtype=torch.float64)
    return _in_parts(states, parts / parts.sum())


def update_norm(state: Mapping[str, Tensor], around: Mapping[str, Tensor]) -> float:
    """The norm of what a state adds to `around`, counters aside."""
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
    """`of` the values of every coordinate, in ascending order (n, …)."""
    return {
        name: _typed(of(torch.stack([state[name].double() for state in states]).sort(0).values), first)
        for name, first in states[0].items()
    }


def _in_parts(states: Sequence[State], parts: Tensor) -> State:
    """The sum of the states in these parts (n,), but of counters the median."""
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
    """What stands in for `Mean` and `EntryMeans` where a run has another rule; holds all that was added.

    `around`: what the clients were sent, from which updates count. `refused`: tells how many clients' replies were
    refused, each of which is one liar fewer for Krum to bear. `few`: an entry may be of few clients, or of one, among
    whom no vote helps, so that updates are clipped first, evenly, by any rule. Raises what those do, and TooFewReplies
    where there are fewer than the rule needs.
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
        """Add one client's state; median, trimmed mean and Krum take no notice of its `weight`, which is above 0."""
        if not weight > 0:
            raise MethodError(f"a mean needs weights above 0, got {weight}")
        self._states.append(dict(state))
        self._weights.append(float(weight))

    def __call__(self) -> State:
        """What stands in for the mean of what was added. All must have the same entries."""
        if not self._states:
            raise MethodError("a mean of nothing: no client replied")
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
        """The same by entry, of the clients that sent it, in place of `old`'s entries; those nobody sent stay."""
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
        """Before all else, as norms are of all that a client sent."""
        if self._few:
            return evenly_clipped(states, self.around, self.rule.largest)
        return norm_clipped(states, self.around, self.rule.number) if self.rule.name == "norm-clip" else states

    def _together(self, states: list[State], weights: list[float]) -> State:
        tolerating = self.rule.tolerating_fewer(self._refused())
        rule, number = tolerating.name, tolerating.number or 0
        if len(states) < tolerating.replies:
            raise TooFewReplies(
                f"aggregate {self.rule} needs {tolerating.replies} replies, and {len(states)} came: resume the run when "
                f"more can answer, or begin one with {self.rule.instead}"
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
        return weighted_mean(states, weights)  # of what was clipped
