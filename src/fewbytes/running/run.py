"""A checked run, as every engine takes it: made once, before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from fewbytes.base.errors import UserError, named
from fewbytes.core.method import Method, check_state
from fewbytes.core.policy import Policy
from fewbytes.core.privacy import accounting, check_models
from fewbytes.core.round_time import RoundTime
from fewbytes.core.rules import Rule
from fewbytes.core.speeds import Speeds
from fewbytes.core.task import Task
from fewbytes.core.trial import check_models as check_first_models
from fewbytes.core.trial import try_models
from fewbytes.engines.terms import Terms
from fewbytes.running.rounding import check_rounding, rates
from fewbytes.running.settings import Settings


@dataclass(frozen=True)
class Run:
    """A method on a task, with settings and a policy; make it with `of`, which checks all of them.

    `task`: with the method's models, and the clients' privacy promises. `notes`: findings about the first models, for
    the user.
    """

    method: Method
    task: Task
    settings: Settings
    policy: Policy
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, method: Method, task: Task, settings: Settings, policy: Policy | None = None) -> Self:
        """Make and check a run; its models are tried unless it is resumed. Raises UserError or MethodError if it cannot
        run."""
        policy = Policy() if policy is None else policy
        if not isinstance(method, Method):
            raise UserError(f"a method is an object like FedAvg(), not {named(method)}")
        if not isinstance(task, Task):
            raise UserError(f"a task is made by Task.of(…) or Task.on(…), not {named(task)}")
        if not isinstance(policy, Policy):
            raise UserError(f"a policy is made by fb.Policy(…), not {named(policy)}")
        task = method.promising(method.adapted(task), settings.dp, method.planned_rounds(settings.rounds))
        method.handlers()  # raises for one that is not a handler
        run = cls(method, task, settings, policy)
        check_settings(method, settings, policy, len(task.problem.clients))
        run._check_task()
        return run if settings.resume else replace(run, notes=run._tried())

    @property
    def rounds(self) -> int:
        """The planned number of rounds."""
        return self.method.planned_rounds(self.settings.rounds)

    def terms(self, folder: Path) -> Terms:
        """The arguments of an engine for this run, in a folder."""
        settings, clients = self.settings, len(self.task.problem.clients)
        speeds = settings.speeds or (None if settings.links is None else Speeds())
        seconds = None if speeds is None else speeds.seconds(clients, self.task.problem.seed)
        links = () if settings.links is None else settings.links.of(clients)
        uplink, downlink = rates(self.method, settings)
        return Terms(
            self.method, self.task, folder, self.policy, settings.coded, settings.keep_frames, uplink, downlink,
            not settings.by_uplink, seconds, links, seconds is not None, RoundTime(settings.round_time),
            settings.save_every or 0.0,
        )  # fmt: skip

    def _check_task(self) -> None:
        settings, problem = self.settings, self.task.problem
        if settings.stop_when is not None:
            settings.stop_when.check(problem.objective.metrics)
        for t in () if problem.stays else range(1, self.rounds + 1):
            if not problem.clients_in(t):
                raise UserError(f"no client is present in round {t} of {self.rounds}: change rounds, or the presence")
        if settings.dp is not None:
            check_models(map(problem.model, problem.architectures()))

    def _tried(self) -> tuple[str, ...]:
        """Notes on the first models. Raises UserError for models that cannot be trained."""
        check_first_models(self.method, self.task)
        check_state(self.method, "server", self.method.server(self.task.problem.on_cpu()))
        self.method.state_class("client")
        return tuple(try_models(self.task))


def check_settings(method: Method, settings: Settings, policy: Policy, clients: int) -> None:
    """Raises UserError for settings that a method does not take, or that do not fit together or this number of clients.
    It needs neither data nor models."""
    name, promise, rule = method.method_name, settings.dp, settings.aggregate
    policy.check(clients)
    if settings.speeds is not None:
        settings.speeds.check(clients)
    if settings.round_time is not None:
        settings.check_round_time(name, method.promises.normalises_steps, policy.round_timeout)
    if settings.engine != "local":
        settings.check_on_flower()
    rule.check(name, method.promises.aggregates, clients)
    check_rounding(method, settings)
    if promise is None:
        return
    accounting()
    promise.check(name, method.promises.protects)
    if rule != Rule():
        raise UserError(f"dp needs the mean of clients' updates, and aggregate is {rule}: leave one out")
    if policy.over_selection:
        raise UserError(
            "dp needs a fixed sample of clients, and over_selection replaces late ones: leave over_selection out"
        )
