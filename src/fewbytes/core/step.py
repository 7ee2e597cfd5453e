"""One step of a run: its randomness, and what is gathered while it is taken."""

from __future__ import annotations

from fewbytes.base.errors import MethodError
from fewbytes.base.streams import stream
from fewbytes.core.client_privacy import ClientPrivacy
from fewbytes.core.gallery import check_name
from fewbytes.core.ledger import LeftOut
from fewbytes.core.means import Means
from fewbytes.core.network import Shown
from fewbytes.core.privacy import Bytes
from fewbytes.core.problem import Id, Problem
from fewbytes.core.records import Gathered
from fewbytes.core.rules import Rule
from fewbytes.core.standing import Updates


class Step:
    """The start of a run, a round, a newcomer's joining or the finish, while it is taken.

    `t`: the round (0: before the first); `names`: what tells the step from others in it. `scored`: whether models are
    scored after it. `rule`: what the server takes of replies where it takes a mean. `privacy`: what the run promises
    its clients, if the server keeps it.
    """

    def __init__(
        self, problem: Problem, t: int = 0, names: tuple[int | str, ...] = (), scored: bool = True,
        rule: Rule | None = None, privacy: ClientPrivacy | None = None,
    ) -> None:  # fmt: skip
        self.t, self.scored, self.rule, self.privacy = t, scored, rule or Rule(), privacy
        self.rng = stream(problem.seed, "server", t, *names)
        self.records = Gathered(problem.objective.metrics)  # what handlers measured for people
        self.updates = Updates(sum(entry.size for entry in problem.layout(0).entries))
        self.shown: dict[str, bytes] = {}  # files of the run's gallery, by name
        self.notes: dict[str, str] = {}  # what people should know of the step, and how much of it there was
        self.left_out: list[LeftOut] = []  # clients whose replies took no part
        self.not_finite: set[str] = set()  # handlers of which a reply held numbers that are not finite
        self.staleness: list[int] = []  # of a stream's replies: how many rounds before each was asked for
        self.cohorts: dict[float, list[Id]] = {}  # the cohort that was drawn, by fraction
        self.streamed: set[Id] = set()  # clients whose part in the step's stream is over
        self.different: set[Id] = set()  # clients whose nodes run something else than the server
        self.calls, self.asked, self.released = 0, 0, 0  # calls so far, clients asked in the last, noisy means

    @property
    def means(self) -> Means:
        """What the run takes of states that clients send."""
        return Means(self.rule, self.privacy, self.refused, self.release)

    def refused(self) -> int:
        """How many clients' replies were refused, or are no longer asked for."""
        return len({left.client for left in self.left_out if left.outcome in ("rejected", "excluded")})

    def release(self) -> tuple[int, Bytes]:
        """Count a noisy mean: how many clients were asked for it, and what its noise is drawn from. A mean is seen by
        nobody before its round's checkpoint, which counts it, is written; so one that is drawn again, by a run that was
        stopped before, counts once. Raises MethodError for a second."""
        if self.privacy is None or self.released:
            raise MethodError("a round has one noisy mean, as more would spend more than is promised")
        self.released += 1
        return self.asked, self.privacy.random(self.t)

    def show(self, name: str, what: Shown) -> None:
        """See `Network.show`; in rounds that are scored, if there is something to see."""
        check_name(name)
        if self.scored and (file := what.drawn()):
            self.shown[f"{name}.{what.ending}"] = file

    def note(self, what: str, how_much: str) -> None:
        """Tell people what they should know of the step; see `Network.note`."""
        self.notes[what] = how_much
