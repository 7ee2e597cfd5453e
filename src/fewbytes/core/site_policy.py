"""What a site allows: rules in its node's configuration that no server can loosen.

Pure: `refusal` decides before anything is run, `withheld` before anything is sent, from the policy, what is asked and
what has left so far. The node (`fewbytes.flower.gate`) provides these and enforces the answers.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

from fewbytes.base.errors import UserError, suggestion
from fewbytes.base.units import parse_bytes

SECURE = "secure-aggregation"
HIDING = "secureaggregation"
"""The name of the method that wraps another to hide its replies in sums."""
PARTS = frozenset({HIDING, "totals"})
"""The names of methods that are only parts of others, and need no permission of their own."""
_DP = re.compile(r"dp-samples\s*<=\s*([0-9.]+(?:e[+-]?[0-9]+)?)")
_HOURS = re.compile(r"([0-9]{1,2})(?::([0-5][0-9]))?\s*-\s*([0-9]{1,2})(?::([0-5][0-9]))?")
NODE_KEYS = frozenset(
    {"partition-id", "member", "num-partitions", "folder", "threads", "tell", "max-runs", "privacy-in-all", "max-drift"}
    | {"client-data", "allow", "key", "min-count", "survey-salt"}
)
"""The other keys of a node's configuration."""


class Hours(NamedTuple):
    """A span of the day: the minutes of its begin and its end, which may be on the next day."""

    begin: int
    end: int

    def __contains__(self, minute: object) -> bool:
        assert isinstance(minute, int)
        if self.begin <= self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def __str__(self) -> str:
        return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in self)


@dataclass(frozen=True)
class SitePolicy:
    """A site's rules; by default everything is allowed.

    `methods`: names of the methods that may run (empty: all). `min_samples`: a client with fewer training samples does
    not take part. `max_bytes_a_round`, `max_bytes_in_all`: limits of what leaves, over all runs for the latter.
    `max_rounds`: limit of all runs together. `secure`: replies must be hidden in sums. `epsilon`: runs must promise
    differential privacy of samples with at most this epsilon. `evaluate_only`: no reply of a method leaves, except
    figures of models. `ask`: a person approves each run. `hours`: local times of the day at which the node works.

    >>> from fewbytes.core.site_policy import SitePolicy
    >>> policy = SitePolicy.read({"methods": "fedavg, fedprox", "max-bytes-a-round": "2MB", "partition-id": 0})
    >>> sorted(policy.methods), policy.max_bytes_a_round
    (['fedavg', 'fedprox'], 2000000)
    """

    methods: frozenset[str] = frozenset()
    min_samples: int = 0
    max_bytes_a_round: float = math.inf
    max_bytes_in_all: float = math.inf
    max_rounds: float = math.inf
    secure: bool = False
    epsilon: float = math.inf
    evaluate_only: bool = False
    ask: bool = False
    hours: Hours | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any], others: bool = False) -> Self:
        """The rules in a node's configuration. Raises UserError for a value that is not a rule, and for an unknown key:
        a misspelt rule would forbid nothing. `others`: whether keys of another application may be there."""
        for key in config:
            if key in KEYS | NODE_KEYS:
                continue
            if (close := suggestion(key, KEYS | NODE_KEYS)) or not others:
                known = close or f": the rules are {', '.join(sorted(KEYS))}"
                raise UserError(f"this node's configuration has an unknown key {key!r}{known}")
        methods = frozenset(_names(config, "methods"))
        hours = config.get("hours")
        secure, epsilon = _required(config)
        return cls(
            methods,
            int(_number(config, "min-samples", 0)),
            _bytes(config, "max-bytes-a-round"),
            _bytes(config, "max-bytes-in-all"),
            _number(config, "max-rounds", math.inf),
            secure,
            epsilon,
            _flag(config, "evaluate-only"),
            _flag(config, "ask"),
            None if hours is None else _hours(hours),
        )

    def rules(self) -> list[str]:
        """What it forbids, a sentence for each rule."""
        found = {
            "methods": f"Only these methods may run: {', '.join(sorted(self.methods))}.",
            "min_samples": f"The node does not take part with fewer than {self.min_samples:,} training samples.",
            "max_bytes_a_round": f"At most {self.max_bytes_a_round:,} bytes leave in a round.",
            "max_bytes_in_all": f"At most {self.max_bytes_in_all:,} bytes leave in all runs together.",
            "max_rounds": f"At most {self.max_rounds:g} rounds are answered in all runs together.",
            "secure": "Replies leave only under secure aggregation, which hides them in a sum.",
            "epsilon": "Replies leave only under differential privacy of training samples, with epsilon at most "
            f"{self.epsilon:g} a run and delta at most 1 / (number of training samples).",
            "evaluate_only": "No reply of a method that trains leaves: only numbers of samples, and figures of models.",
            "ask": "A person at the site approves each run.",
            "hours": f"The node works from {' to '.join(str(self.hours).split('-'))}, local time.",
        }
        return [found[f.name] for f in fields(self) if getattr(self, f.name) != f.default]


KEYS = frozenset(
    {"methods", "min-samples", "max-bytes-a-round", "max-bytes-in-all", "max-rounds", "require"}
    | {"evaluate-only", "ask", "hours"}
)
"""The rules' keys in a node's configuration."""


@dataclass(frozen=True)
class Request:
    """What a server asks of a site: `order`, a digest of all of it; `methods`, the names of the method and of those it
    wraps; `samples`, the client's number of training samples; `replies`, whether the handler sends a reply; `hidden`,
    whether the server sees it only in a sum; `evaluates`, whether it only has figures of models; `privacy`, the
    promised epsilon and delta, if noise really hides samples; `approved`, whether a person approved the run; `minute`,
    the local time in minutes of the day."""

    run: str
    round: int
    handler: str
    order: str
    methods: frozenset[str]
    samples: int
    replies: bool
    hidden: bool = False
    evaluates: bool = False
    privacy: tuple[float, float] | None = None
    approved: bool = False
    minute: int = 0


@dataclass
class History:
    """What has left a site in all runs: bytes, also by run and round; the rounds of each run that were answered, and
    the different orders that each handler answered, whichever rounds a server said they were of."""

    bytes_in_all: int = 0
    bytes_of: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    rounds_of: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    orders_of: dict[str, dict[str, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))

    def add(self, request: Request, nbytes: int) -> None:
        """Count an answer."""
        self.count(request.run, request.round, request.handler if request.replies else "", request.order, nbytes)

    def count(self, run: str, t: int, handler: str, order: str, nbytes: int) -> None:
        """Count an answer; `handler` is empty if it is not a method's reply."""
        self.bytes_in_all += nbytes
        self.bytes_of[run, t] += nbytes
        if handler:
            self.rounds_of[run].add(t)
            self.orders_of[run][handler].add(order)

    def rounds(self) -> int:
        """The number of rounds that were answered: those that servers named, or more if a handler answered more
        orders than that."""
        return sum(max(len(ts), *map(len, self.orders_of[run].values())) for run, ts in self.rounds_of.items())

    def rounds_with(self, request: Request) -> int:
        """`rounds` after another reply."""
        run, ts = request.run, self.rounds_of.get(request.run, set()) | {request.round}
        orders = {name: set(each) for name, each in self.orders_of.get(run, {}).items()}
        orders.setdefault(request.handler, set()).add(request.order)
        before = max(len(self.rounds_of[run]), *map(len, self.orders_of[run].values())) if run in self.rounds_of else 0
        return self.rounds() - before + max(len(ts), *map(len, orders.values()))


def refusal(policy: SitePolicy, request: Request, history: History) -> str | None:
    """Why a site does not carry out a request; None if it does."""
    if policy.methods and (others := sorted(request.methods - policy.methods - PARTS)):
        return f"{others[0]} is not among its methods ({', '.join(sorted(policy.methods))})"
    if request.samples < policy.min_samples:
        return f"it would take part with fewer than {policy.min_samples} training samples (min-samples)"
    if policy.secure and not request.hidden:
        return f"it takes part only under secure aggregation (require = {SECURE!r})"
    if (why := _not_private(policy, request)) is not None:
        return why
    if policy.hours is not None and request.minute not in policy.hours:
        return f"it works from {' to '.join(str(policy.hours).split('-'))}, its local time (hours)"
    if policy.ask and not request.approved:
        return "a person there has not approved this run (ask)"
    if policy.evaluate_only and request.replies and not request.evaluates:
        return "it only evaluates, and sends no replies of methods (evaluate-only)"
    if history.bytes_in_all >= policy.max_bytes_in_all:
        return f"all its {policy.max_bytes_in_all:,} bytes have left (max-bytes-in-all)"
    known = not request.replies and request.round in history.rounds_of.get(request.run, ())
    asked = history.rounds_with(request) if request.replies else history.rounds() + 1
    if asked > policy.max_rounds and not known:  # a round that it has answered may still be scored
        return f"all its {policy.max_rounds:g} rounds are answered (max-rounds)"
    return None


def withheld(policy: SitePolicy, request: Request, nbytes: int, history: History) -> str | None:
    """Why a site does not send an answer of `nbytes`; None if it does."""
    if (why := refusal(policy, request, history)) is not None:
        return why
    before = history.bytes_of.get((request.run, request.round), 0)
    if before + nbytes > policy.max_bytes_a_round:
        left = f" after {before:,} in this round" if before else ""
        return f"its answer has {nbytes:,} bytes{left}, more than {policy.max_bytes_a_round:,} (max-bytes-a-round)"
    if history.bytes_in_all + nbytes > policy.max_bytes_in_all:
        return (
            f"its answer has {nbytes:,} bytes after {history.bytes_in_all:,}, more than "
            f"{policy.max_bytes_in_all:,} (max-bytes-in-all)"
        )
    return None


def _not_private(policy: SitePolicy, request: Request) -> str | None:
    """Why a run's promise to samples is not enough; None if it is."""
    if policy.epsilon == math.inf:
        return None
    wanted = f"(require = 'dp-samples<={policy.epsilon:g}')"
    if request.privacy is None:
        return f"it takes part only under differential privacy of samples, with secret noise {wanted}"
    epsilon, delta = request.privacy
    if not epsilon <= policy.epsilon:
        return f"epsilon {epsilon:g} is above its {policy.epsilon:g} {wanted}"
    if not delta * request.samples <= 1:
        return f"delta {delta:g} is above 1 / (its number of training samples) {wanted}"
    return None


def _names(config: Mapping[str, Any], key: str) -> list[str]:
    """Names with commas. Raises UserError for none, where the key is given."""
    text = config.get(key, "")
    names = [name.strip() for name in text.split(",") if name.strip()] if isinstance(text, str) else []
    if key in config and not names:
        raise UserError(f"{key} is a text of names with commas in this node's configuration, not {text!r}")
    return names


def _required(config: Mapping[str, Any]) -> tuple[bool, float]:
    """Whether secure aggregation is required, and the maximum epsilon."""
    secure, epsilon = False, math.inf
    for each in _names(config, "require"):
        found = _DP.fullmatch(each)
        limit = float(found[1]) if found and found[1].count(".") < 2 else 0.0
        if each == SECURE:
            secure = True
        elif 0 < limit < math.inf:
            epsilon = min(epsilon, limit)
        else:
            raise UserError(f"require is {SECURE} or dp-samples<=8 in this node's configuration, not {each!r}")
    return secure, epsilon


def _number(config: Mapping[str, Any], key: str, usual: float) -> float:
    value = config.get(key, usual)
    if key in config and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise UserError(f"{key} is a whole number in this node's configuration, not {value!r}")
    return float(value) if value == math.inf else int(value)


def _bytes(config: Mapping[str, Any], key: str) -> float:
    if key not in config:
        return math.inf
    try:
        value = config[key]
        if isinstance(value, bool):
            raise UserError("")
        return 0 if value == 0 else parse_bytes(value)
    except (UserError, TypeError, ValueError):
        raise UserError(
            f"{key} is an amount like 2MB or 300000 in this node's configuration, not {config[key]!r}"
        ) from None


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key, False)
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):  # Flower's own nodes are given text
        return value.lower() == "true"
    raise UserError(f"{key} is true or false in this node's configuration, not {value!r}")


def _hours(text: Any) -> Hours:
    found = _HOURS.fullmatch(text.strip()) if isinstance(text, str) else None
    if found:
        begin, end = (60 * int(found[i]) + int(found[i + 1] or 0) for i in (1, 3))
        if begin < 24 * 60 >= end and begin != end:
            return Hours(begin, end)
    raise UserError(f"hours is a span like 20:00-6:00 in this node's configuration, not {text!r}")
