"""How good the models are after a round: every client's own on its test split, the server's on its test set."""

from __future__ import annotations

from typing import Any

import numpy as np

from fewbytes.base.cores import all_cores
from fewbytes.base.streams import seeded
from fewbytes.engines.base import Engine


def scored_models(engine: Engine, state: Any, last: bool) -> dict[str, float]:
    """Accuracies by kind, in [0, 1]; after the last round predictions are shown, where the objective has pictures.

    `personalised`: of clients' own models, the mean over clients; `micro`: over all their samples; `newcomers`: of
    those who came after round 1, where others are there, too. The server's model is scored by the objective.
    """
    accuracy = {}
    scores = {i: score for i, score in engine.score_clients().items() if score[1]}  # 0 samples: no model yet
    if scores:
        accuracy["personalised"] = float(np.mean([correct / n for correct, n in scores.values()]))
        accuracy["micro"] = sum(c for c, _ in scores.values()) / sum(n for _, n in scores.values())
    problem = engine.problem
    first = set(problem.clients_in(1))
    late = [correct / n for i, (correct, n) in scores.items() if i not in first]
    if late and len(late) < len(scores):
        accuracy["newcomers"] = float(np.mean(late))
    model = engine.method.global_model(state, problem)
    if model is not None:
        show = engine.network.show_images if last else None
        with all_cores(), seeded(problem.seed, "score", engine.t):
            accuracy |= problem.objective.score(model, engine.task.data.test, problem.device, problem.precision, show)
    return accuracy
