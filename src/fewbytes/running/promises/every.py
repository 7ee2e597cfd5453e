"""Every promise of a run, in one list: adding one touches no other."""

from __future__ import annotations

from pathlib import Path

from fewbytes.core.method import Method
from fewbytes.core.problem import Task
from fewbytes.core.rules import Rule
from fewbytes.running.promises.aggregate import Aggregate
from fewbytes.running.promises.alarms import Alarms
from fewbytes.running.promises.budget import Budget
from fewbytes.running.promises.finite import NotFinite
from fewbytes.running.promises.headline import Headline
from fewbytes.running.promises.joiners import Joiners
from fewbytes.running.promises.measured import Measured
from fewbytes.running.promises.notes import Notes
from fewbytes.running.promises.privacy import Spending, promised
from fewbytes.running.promises.promise import Promise
from fewbytes.running.promises.stop import Stop
from fewbytes.running.promises.times import Simulated, Times
from fewbytes.running.rounding import check_rounding
from fewbytes.running.settings import Settings


def promises_of(method: Method, task: Task, settings: Settings, folder: Path) -> list[Promise]:
    """What a run of these settings promises. Raises UserError for what cannot be promised."""
    problem, rounds, ends = task.problem, method.planned_rounds(settings.rounds), not method.own_rounds
    promises: list[Promise] = [Measured()]
    if settings.budget is not None:
        promises.append(Budget(settings.budget, ends))
    if settings.stop_when is not None:
        promises.append(Stop(settings.stop_when, problem.objective.metrics, method.promises.headline, ends))
    if settings.aggregate != Rule():
        promises.append(Aggregate(settings.aggregate, method, len(problem.clients)))
    check_rounding(method, settings)
    if settings.speeds is not None:
        promises.append(Simulated(settings.speeds))
    spending = promised(method, task, settings)
    promises += [NotFinite(problem.objective), Alarms(), Joiners(method, problem, rounds, settings.watcher), Notes()]
    if spending is not None:
        promises.append(Spending(spending, rounds, problem.seed, folder))
    return [*promises, Times(settings.speeds is not None), Headline(method)]
