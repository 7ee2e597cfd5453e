"""Measures whether a trained model reveals its training samples: membership inference.

Two attacks on the saved model of a run, from its outputs for a sample of known label:

- loss threshold: Yeom, Giacomelli, Fredrikson, Jha, "Privacy Risk in Machine Learning: Analyzing the Connection to
  Overfitting", CSF 2018. The lower the loss, the more likely a member.
- LiRA: Carlini, Chien, Nasr, Song, Terzis, Tramèr, "Membership Inference Attacks From First Principles", IEEE S&P 2022,
  online. Shadow models, each trained on a random half of the candidate samples, give the distribution of
  phi = log(p / (1 - p)), p the probability of the label, for samples in and outside the training data: two normal
  distributions, with variances pooled over samples as there are few models. The score is their log ratio.

Worst case for the clients: shadow models also learn from all other members, as if the attacker knew them. They train
centrally, with the method's local training, for as many epochs as the run, and with its noise if the run promises
sample-level privacy. The control is a similar model, overfitted to a few samples and attacked the same way: an attack
that does not recognise its members is void.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from fewbytes.analysis.settings import Inferring
from fewbytes.base.errors import UserError
from fewbytes.base.files import replacing
from fewbytes.base.named import only_allowed
from fewbytes.base.streams import seeded, stream
from fewbytes.core.method import Method
from fewbytes.core.privacy import PrivateSteps, random_bytes
from fewbytes.core.problem import Id
from fewbytes.core.task import Task
from fewbytes.core.training import Local, fit, outputs, prepared, ready
from fewbytes.data import Split
from fewbytes.experiments.settings import experiment_of
from fewbytes.experiments.tasks import find
from fewbytes.models.files import load_model
from fewbytes.report.leaks import CONTROL_AUC, membership_words
from fewbytes.report.records import Membership
from fewbytes.report.table import figures_table, percent

FALSE_ALARMS = 0.01  # the false-positive rate at which recognised members are counted
FEWEST = 100  # minimum number of members, and of others, to measure a rate of 1 %
CONTROL_SAMPLES = 50
OVERFITTING = Local(epochs=60, lr=2e-3, batch=20, optimiser="adam")

Progress = Callable[[int, int, str], None]
"""Called with progress: (shadow models done, total models, text)."""


@dataclass(frozen=True)
class Pool:
    """Samples x (n, …) and labels y (n,), whose first 2 `half` are the candidates: members before others.

    `learn` trains a new model on rows (m,) of the pool; a name seeds weights and order.
    """

    x: Tensor
    y: Tensor
    half: int
    learn: Callable[[Tensor, Tensor, str], nn.Module]

    def confidences(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Minus the loss, and phi, of the candidates, float64 (2 half,)."""
        logits = outputs(model, self.x[: 2 * self.half]).double()
        labels = self.y[: 2 * self.half, None]
        right = logits.gather(1, labels)[:, 0]
        others = logits.scatter(1, labels, -math.inf).logsumexp(1)
        return -F.cross_entropy(logits, labels[:, 0], reduction="none"), right - others


def membership(run: Path, how: Inferring | None = None, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Distinguish training samples of a run's model from others; writes and returns RUN/membership.json.

    The model is the global one, with all clients' training samples as members. If a client is named, or the run saved
    no global model, it is the client's own, with its samples. The others are as many test samples of the server, or of
    all clients, of the same classes. The same seed, on as many threads, gives the same file; an attack stopped early
    writes nothing. Raises UserError for a folder that is not a run's or has no such model, data without classes, and a
    method without local training.
    """
    how = how or Inferring()
    experiment = experiment_of(run)
    with only_allowed():  # imports only what is allowed
        method = experiment.build_method()
        task = method.adapted(find(experiment).task)
        if task.data.learns != "classes":
            raise UserError(
                f"members are recognised by the loss of their class, and here {task.data.learns} are learnt"
            )
        if not isinstance(getattr(method, "local", None), Local):
            raise UserError(f"{experiment.method} has no local training to train shadow models with")
        own = how.client is not None or not (run / "models" / "global.safetensors").is_file()
        client = how.client or 0
        if client not in task.problem.clients:
            raise UserError(f"there is no client {client}: the run has {len(task.problem.clients)} clients")
        victim = load_model(run, client if own else None).to(task.problem.device)
        rounds = method.planned_rounds(experiment.run.rounds)
        parts = [task.data.clients[client].train] if own else [each.train for each in task.data.clients]
        pool, small = pools(method, task, client, parts, rounds, how)
        steps = 2 * how.shadows + 1
        progress(0, steps, "control")
        half = torch.arange(small.half)
        control = attack_figures(small, small.learn(small.x[half], small.y[half], "control"), how, progress, 0)
        found = attack_figures(pool, prepared(victim), how, progress, how.shadows + 1)
    progress(steps, steps, "done")
    attacks = [
        {"attack": name, **found[name], "control_auc": control[name]["auc"], "control_tpr": control[name]["tpr"]}
        | {"void": control[name]["auc"] < CONTROL_AUC}
        for name in found
    ]
    result = {
        "method": experiment.method,
        "model": f"client {client}" if own else "global",
        "members": pool.half,
        "shadows": how.shadows,
        "seed": how.seed,
        "attacks": attacks,
    }
    with replacing(run / "membership.json") as file:
        file.write(json.dumps(result, indent=2).encode())
    return result


def membership_table(result: dict[str, Any]) -> Table:
    """The result of `membership` as a table for the terminal: a row per attack."""
    caption = "\n".join(membership_words(cast(Membership, result)))
    table = figures_table(caption, ["attack"], ["AUC", "TPR at 1 % FPR", "control's AUC", "control's TPR"])
    for row in result["attacks"]:
        figures = [f"{row['auc']:.2f}", percent(row["tpr"]), f"{row['control_auc']:.2f}", percent(row["control_tpr"])]
        table.add_row(row["attack"], *figures)
    return table


def pools(method: Method, task: Task, client: Id, parts: list[Split], rounds: int, how: Inferring) -> tuple[Pool, Pool]:
    """The attacked pool, with members from `parts`, and the control's, with a few of its samples. Raises UserError."""
    problem, local = task.problem, method.local  # type: ignore[attr-defined]
    tests = [task.data.test] if len(task.data.test) else [each.test for each in task.data.clients]
    (x, y), (other_x, other_y) = (_loaded(splits, problem.device) for splits in (parts, tests))
    rng = stream(how.seed, "membership", "samples")
    chosen, others = matched(y.cpu(), other_y.cpu(), how.samples, rng)
    half = len(chosen)
    if half < FEWEST:
        raise UserError(f"{half} members and others are too few: the attack needs at least {FEWEST} of each")
    left = torch.ones(len(y), dtype=torch.bool)
    left[chosen] = False
    rest = left.nonzero()[:, 0]
    x, y = torch.cat([x[chosen], other_x[others], x[rest]]), torch.cat([y[chosen], other_y[others], y[rest]])
    taken = max(1, round(rounds * method.parameters.get("fraction", 1.0)))  # rounds that a client takes part in

    def learn(x: Tensor, y: Tensor, name: str, terms: Local = local, rounds: int = taken) -> nn.Module:
        with seeded(how.seed, "membership", name):
            model = prepared(problem.drawn(client).to(problem.device))
            loss = problem.objective.loss(model, None, y)
            for t in range(1, rounds + 1):
                transform, private = None, None
                if terms is local:
                    transform = parts[-1].transform
                    if problem.privacy is not None:
                        noise = random_bytes(str(how.seed).encode(), "membership", name, t)
                        private = PrivateSteps(problem.privacy, len(y), noise)
                fit(model, x, y, terms, t, precision=problem.precision, transform=transform, private=private, loss=loss)
        return model

    few = torch.cat([torch.arange(CONTROL_SAMPLES), torch.arange(half, half + CONTROL_SAMPLES)])
    overfit = Pool(x[few], y[few], CONTROL_SAMPLES, lambda x, y, name: learn(x, y, f"few {name}", OVERFITTING, 1))
    return Pool(x, y, half, learn), overfit


def matched(mine: Tensor, theirs: Tensor, most: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """At most `most` pairs of rows, of labels `mine` (m,) and `theirs` (n,), of the same class: with unequal classes,
    an attack could recognise the class instead of the membership."""
    pairs: list[tuple[int, int]] = []
    for label in mine.unique():
        a, b = (rng.permutation((labels == label).nonzero()[:, 0].numpy()) for labels in (mine, theirs))
        pairs += zip(a.tolist(), b.tolist(), strict=False)
    rows = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)[rng.permutation(len(pairs))[:most]]
    return rows[:, 0], rows[:, 1]


def attack_figures(pool: Pool, victim: nn.Module, how: Inferring, progress: Progress, done: int) -> dict[str, Any]:
    """The figures by attack: `auc`, and `tpr` at FALSE_ALARMS. `done`: number of models trained before."""
    loss, phi = pool.confidences(victim)
    n = 2 * pool.half
    turns = torch.from_numpy(stream(how.seed, "membership", "halves").random((how.shadows, n))).argsort(0).argsort(0)
    inside = (turns < how.shadows // 2).to(phi.device)  # each sample in half of the models
    shadows = []
    for i in range(how.shadows):
        rows = torch.cat([inside[i].nonzero()[:, 0], torch.arange(n, len(pool.y), device=phi.device)])
        shadows.append(pool.confidences(pool.learn(pool.x[rows], pool.y[rows], f"shadow {i}"))[1])
        progress(done + i + 1, 2 * how.shadows + 1, f"shadow model {i + 1}/{how.shadows}")
    scores = {"loss threshold": loss, "LiRA": lira(phi, torch.stack(shadows), inside)}
    return {
        name: {"auc": auc(score, pool.half), "tpr": true_positives(score, pool.half)} for name, score in scores.items()
    }


def lira(phi: Tensor, shadows: Tensor, inside: Tensor) -> Tensor:
    """The log likelihood ratio (n,), up to a constant, that phi (n,) is from a model trained on the sample.

    `shadows`: phi of every shadow model (models, n); `inside`: whether it was trained on a sample, bool (models, n).
    """
    score = torch.zeros_like(phi)
    for sign, them in ((1, inside), (-1, ~inside)):
        count = them.sum(0)
        mean = (shadows * them).sum(0) / count
        variance = ((shadows - mean).square() * them).sum() / (count - 1).sum()
        score -= sign * (phi - mean).square() / (2 * variance.clamp(min=1e-12))
    return score


def auc(score: Tensor, half: int) -> float:
    """The area under the ROC curve of scores (n,), the first `half` being members: the probability that a member scores
    above another sample; ties count half."""
    members, others = score[:half].contiguous(), score[half:].sort().values
    below, upto = (torch.searchsorted(others, members, right=right).double() for right in (False, True))
    return float((below + upto).mean() / (2 * len(others)))


def true_positives(score: Tensor, half: int) -> float:
    """The share of members that score above all but FALSE_ALARMS of the others."""
    others = score[half:].sort(descending=True).values
    return float((score[:half] > others[int(FALSE_ALARMS * len(others))]).double().mean())


def _loaded(splits: list[Split], device: str) -> tuple[Tensor, Tensor]:
    """All samples of some splits together."""
    loaded = [split.load(device) for split in splits if len(split)]
    if not loaded:
        raise UserError("the run has no test samples to compare members with")
    return ready(torch.cat([x for x, _ in loaded])), torch.cat([y for _, y in loaded])
