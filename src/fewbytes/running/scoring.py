"""How good the models are after a round: every client's own on its test split, the server's on its test set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fewbytes.base.cores import all_cores
from fewbytes.base.streams import seeded
from fewbytes.core.method import check_model
from fewbytes.core.metrics import Scores
from fewbytes.core.problem import Id
from fewbytes.core.records import ByMetric, mean_scores, pooled_scores
from fewbytes.engines.engine import Engine
from fewbytes.running.promises.promise import RECEIVED, Phase, Row
from fewbytes.running.rounds import Rounds

MOST_BY_CLIENT = 50  # maximum number of clients of a run whose lines have each client's scores


def score(done: Phase, engine: Engine, state: Any, rounds: Rounds, rows: Sequence[Row], due: bool) -> None:
    """Score the models after a phase if it is `due`, if the round turns out to be the last, or at the finish if the
    method is scored then. `rows`: the lines of earlier phases."""
    whole, t = done.phase == "round", done.round
    sent = {"round": t, "phase": done.phase, "scores": {}, "seconds": done.seconds[0], **done.bytes}
    if whole and rounds.may_end("sent"):
        if rounds.end([*rows, sent], t):
            due = True
        elif not due:
            engine.step.records.scores, engine.step.shown = {}, {}
    done.scores, done.pooled = engine.step.records.means(), engine.step.records.pooled()
    if due or (done.phase == "finish" and engine.method.promises.scored_after_finish):
        shown, open_end = dict(engine.step.shown), due and t < rounds.last and rounds.may_end("scored")
        answered, validated = engine.scheduler.score_clients()
        own = {i: scores for i, scores in answered.items() if scores}  # none: no model yet
        done.validation = mean_scores({"personalised": {i: scores for i, scores in validated.items() if scores}})
        last = t >= rounds.last or open_end
        done.scores = merged(done.scores, scored_models(engine, state, own, last))
        done.validation = merged(done.validation, validated_model(engine, state))
        if "global" not in next(iter(done.validation.values()), {}):  # the server has no validation data
            done.validation = merged(done.validation, pooled_scores({RECEIVED: engine.step.received}))
        if len(engine.problem.clients) <= MOST_BY_CLIENT:
            done.by_client = client_scores(engine.step.records.scores | ({"personalised": own} if own else {}))
        if open_end and not rounds.end([*rows, sent | {"scores": done.scores, "validation": done.validation}], t):
            engine.step.shown = shown  # without predictions, which are shown after the last round
        if t >= rounds.last:
            done.details = details(engine, state)


def scored_models(engine: Engine, state: Any, scores: Mapping[Id, Scores], last: bool) -> ByMetric:
    """Scores by metric and kind, with the `scores` of clients' own models; after the last round predictions are shown,
    where the objective has pictures.

    `personalised`: of clients' own models, the mean over clients; `micro`: over all their samples; `newcomers`: of
    clients that joined after round 1, if others are present, too; `global`: of the server's model on its test set.
    """
    problem = engine.problem
    first = set(problem.clients_in(1))
    late = {i: score for i, score in scores.items() if i not in first}
    found = merged(mean_scores({"personalised": scores}), pooled_scores({"micro": scores}))
    found = merged(found, mean_scores({"newcomers": late}) if len(late) < len(scores) else {})
    model = engine.method.global_model(state, problem)
    check_model(engine.method, "global_model", model)
    if model is not None:
        show = engine.network.show if last else None
        with all_cores(), seeded(problem.seed, "score", engine.step.t):
            values = problem.objective.score(model, engine.task.data.test, problem.device, problem.precision, show)
        found = merged(found, {metric: {"global": value} for metric, value in values.items()})
    return found


def validated_model(engine: Engine, state: Any) -> ByMetric:
    """Scores of the global model on the server's validation data, by metric and kind; empty without either."""
    problem, validation = engine.problem, engine.task.data.validation
    model = None if validation is None else engine.method.global_model(state, problem)
    if model is None or validation is None:
        return {}
    with all_cores(), seeded(problem.seed, "validate", engine.step.t):
        values = problem.objective.score(model, validation, problem.device, problem.precision, None)
    return {metric: {"global": value} for metric, value in values.items()}


def details(engine: Engine, state: Any) -> dict[str, Any]:
    """More about the global model's predictions of the server's test set (`Objective.details`)."""
    problem, test = engine.problem, engine.task.data.test
    model = engine.method.global_model(state, problem)
    if model is None or not len(test):
        return {}
    with all_cores(), seeded(problem.seed, "details", engine.step.t):
        return problem.objective.details(model, test, problem.device, problem.precision, problem.seed)


def client_scores(scores: Mapping[str, Mapping[int, Scores]]) -> dict[str, dict[str, dict[str, float]]]:
    """By metric, kind and client (its number as text) the score."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind, of in scores.items():
        for client in sorted(of):
            for metric, (total, n) in of[client].items():
                found.setdefault(metric, {}).setdefault(kind, {})[str(client)] = total / n
    return found


def merged(some: ByMetric, more: ByMetric) -> ByMetric:
    """The scores of both; `more` replaces equal entries."""
    return {metric: some.get(metric, {}) | more.get(metric, {}) for metric in dict.fromkeys([*some, *more])}
