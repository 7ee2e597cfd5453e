"""Every promise of a run, in one list: adding one touches no other."""

from __future__ import annotations

from pathlib import Path

from fewbytes.core.rules import Rule
from fewbytes.data.schema import DOUBT
from fewbytes.running.promises.absences import Absences
from fewbytes.running.promises.aggregate import Aggregate
from fewbytes.running.promises.alarms import Alarms
from fewbytes.running.promises.best import BestModel
from fewbytes.running.promises.budget import Budget
from fewbytes.running.promises.finite import NotFinite
from fewbytes.running.promises.headline import Headline
from fewbytes.running.promises.joiners import Joiners
from fewbytes.running.promises.measured import Measured
from fewbytes.running.promises.notes import Notes
from fewbytes.running.promises.privacy import Spending
from fewbytes.running.promises.promise import Promise
from fewbytes.running.promises.rates import Rates
from fewbytes.running.promises.software import OtherSoftware
from fewbytes.running.promises.stop import Stop
from fewbytes.running.promises.times import Simulated, Times
from fewbytes.running.rounding import asked, rounding_notes
from fewbytes.running.run import Run


def promises_of(run: Run, folder: Path) -> list[Promise]:
    """The promises of a run."""
    method, problem, settings = run.method, run.task.problem, run.settings
    promises: list[Promise] = [Measured()]
    if settings.budget is not None:
        promises.append(Budget(settings.budget, ends=not method.own_rounds))
    if settings.stop_when is not None:
        metrics, headline = problem.objective.metrics, method.promises.headline
        promises.append(Stop(settings.stop_when, metrics, headline, ends=not method.own_rounds))
    validated = run.task.data.validation is not None
    if (validated or (settings.stop_when is not None and settings.stop_when.patience)) and problem.objective.metrics:
        promises.append(BestModel(problem.objective.metrics, method.promises.headline, validated))
    if settings.aggregate != Rule():
        promises.append(Aggregate(settings.aggregate))
    promises.append(Simulated(settings))
    doubts = [note for note in settings.about.get("notes", ()) if f": {DOUBT} column" in note]
    promises += [NotFinite(problem.objective, doubts), Alarms(), Joiners(method, settings.watcher), Absences()]
    promises.append(Notes(rounding_notes(method, settings), asked(settings)))
    promises += [Rates(settings), OtherSoftware()]
    if settings.dp is not None:
        promises.append(Spending(settings.dp, run.rounds, problem.seed, folder))
    return [*promises, Times(settings.speeds is not None or settings.links is not None), Headline(method)]
