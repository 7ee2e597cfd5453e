"""One step of a run: its randomness, and the data gathered in it."""

from __future__ import annotations

from fewbytes.base.errors import MethodError
from fewbytes.base.streams import stream
from fewbytes.core.client_privacy import ClientPrivacy
from fewbytes.core.gallery import check_name
from fewbytes.core.ledger import LeftOut
from fewbytes.core.means import Means
from fewbytes.core.metrics import Scores
from fewbytes.core.network import Shown
from fewbytes.core.privacy import Bytes
from fewbytes.core.problem import Id, Problem
from fewbytes.core.records import Gathered
from fewbytes.core.rules import Rule
from fewbytes.core.standing import Updates


class Step:
    """The current step: the start of a run, a round, a newcomer's joining or the finish.

    `t`: the round (0: before the first); `names`: distinguish the step from others in it. `scored`: whether models are
    scored after it. `rule`: the server's aggregation rule. `privacy`: of clients, if the server keeps it.
    """

    def __init__(
        self, problem: Problem, t: int = 0, names: tuple[int | str, ...] = (), scored: bool = True,
        rule: Rule | None = None, privacy: ClientPrivacy | None = None,
    ) -> None:  # fmt: skip
        self.t, self.scored, self.rule, self.privacy = t, scored, rule or Rule(), privacy
        self.rng = stream(problem.seed, "server", t, *names)
        self.records = Gathered(problem.objective.metrics)  # handlers' measurements for people
        self.received: dict[Id, Scores] = {}  # of the models that clients received, on their validation data
        self.updates = Updates(sum(entry.size for entry in problem.layout(0).entries))
        self.shown: dict[str, bytes] = {}  # files of the run's gallery, by name
        self.notes: dict[str, str] = {}  # notes for people about the step, with amounts
        self.left_out: list[LeftOut] = []  # clients whose replies were not used
        self.not_finite: set[str] = set()  # handlers with non-finite numbers in a reply
        self.staleness: list[int] = []  # of a stream's replies: rounds since each was asked for
        self.cohorts: dict[float, list[Id]] = {}  # the sampled clients, by fraction
        self.streamed: set[Id] = set()  # clients that have finished in the step's stream
        self.different: set[Id] = set()  # clients whose nodes run other code or settings than the server
        self.calls, self.asked, self.released = 0, 0, 0  # calls so far, clients asked in the last, noisy means

    @property
    def means(self) -> Means:
        """The run's aggregation of clients' states."""
        return Means(self.rule, self.privacy, self.refused, self.release)

    def refused(self) -> int:
        """Number of clients whose replies were refused, or who are no longer asked."""
        return len({left.client for left in self.left_out if left.outcome in ("rejected", "excluded")})

    def release(self) -> tuple[int, Bytes]:
        """Count a noisy mean; returns the number of clients asked for it, and the source of its noise. Nobody sees a
        mean before its round's checkpoint, which counts it, is written; so a mean drawn again after an interruption
        counts once. Raises MethodError for a second one."""
        if self.privacy is None or self.released:
            raise MethodError("a round has one noisy mean, as more would spend more than is promised")
        self.released += 1
        return self.asked, self.privacy.random(self.t)

    def show(self, name: str, what: Shown) -> None:
        """See `Network.show`; only in rounds with scores, if there is something to see."""
        check_name(name)
        if self.scored and (file := what.drawn()):
            self.shown[f"{name}.{what.ending}"] = file

    def note(self, what: str, how_much: str) -> None:
        """Note something people should know about the step; see `Network.note`."""
        self.notes[what] = how_much
