"""What lying clients do to a model, with and without rules that bear them; what uploads and models tell of samples."""

from __future__ import annotations

import math
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, cast

from figures import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
from imprints import hidden
from runs import configured

from fewbytes.analysis.attack import attack
from fewbytes.analysis.imprint import imprint, imprinted_model
from fewbytes.analysis.membership import FALSE_ALARMS, membership
from fewbytes.analysis.poisoning import poison
from fewbytes.analysis.settings import Attacking, Inferring, Poisoning
from fewbytes.base.errors import UserError
from fewbytes.core.rules import EVERY_RULE
from fewbytes.core.trust import drift as drift_of
from fewbytes.experiments.settings import experiment_of
from fewbytes.experiments.tasks import find
from fewbytes.models.files import load_model
from fewbytes.report.leaks import CONTROL_AUC, succeeds, withstands
from fewbytes.report.records import Poison

warnings.simplefilter("ignore")
torch.set_num_threads(1)
LIARS = 2  # of ten
RULES = ",".join(f"{rule}={LIARS}" if "krum" in rule else rule for rule in sorted(EVERY_RULE))
CLIPPED = "epsilon=50,delta=1e-5,clip=0.5"  # little noise: ten clients bear no more
NOISE = 1e-3  # variance
INVERTED = ("fedavg", "fedper", "fedpurin", "partialfed", "genefl", "fedproto")
EPSILON, DELTA = 2.0, 1e-5
FEW = {"rounds": 20, "clients": 2, "partition": "iid", "samples": "180/30"}
PLAIN = {"epochs": 5, "lr": 0.2, "batch": 20}
PRIVATE = {"epochs": 1, "lr": 0.5, "batch": 60}


def poisoned(rounds: int) -> list[Figure]:
    """Row 19: digits, ten clients, two of which lie in each way but the backdoor, so many rounds."""
    found = []
    for kind, words in {
        "scale": "100 times their update",
        "flip": "-100 times their update",
        "noise": "noise 100 times as long as their update",
        "labels": "5 times an update trained on wrong labels",
    }.items():
        result = lied(kind, rounds)
        clean, (control, *rules) = result["clean"], result["poisoned"]
        figure = f"{_percent(control['accuracy'])} ({_percent(clean['accuracy'])} without attack)"
        what = f"the mean, two of ten clients send {words}: the control"
        found.append(Figure(what, figure, "20 points below clean, or the test is void", succeeds(result)))
        for row in rules:
            what, figure = f"{row['rule']}, {kind}", _percent(row["accuracy"])
            found.append(Figure(what, figure, "within 3 points of clean", withstands(result, row)))
    return found


def backdoored(rounds: int) -> list[Figure]:
    """Row 20: digits, ten clients, two of which put a backdoor into the model by replacing it, so many rounds."""
    result = lied("backdoor", rounds)
    clean, (control, *rules) = result["clean"], result["poisoned"]
    found = [
        Figure(
            f"the mean, two of ten clients, accuracy {_percent(control['accuracy'])}: the control's success",
            f"{_percent(control['success'])} ({_percent(clean['success'])} without attack)",
            "at least 80 %, or the test is void",
            succeeds(result),
        )
    ]
    noisy = lied("backdoor", rounds, "", dp=f"{CLIPPED},noise=seeded")["poisoned"][0]
    for row in (*rules, noisy | {"rule": f"the mean with --dp {CLIPPED}"}):
        figure = f"{_percent(row['success'])}, accuracy {_percent(row['accuracy'])}"
        goal = f"at most 15 %, accuracy within 2 points of {_percent(clean['accuracy'])}"
        found.append(Figure(f"{row['rule']}: success", figure, goal, withstands(result, row)))
    return found


def lied(kind: Any, rounds: int, rules: str = RULES, **more: Any) -> Poison:
    """What a run becomes in which two of ten clients lie, by the mean and by rules."""
    terms = {"rounds": rounds, "clients": 10, "partition": "iid", "parameters": {"epochs": 2, "lr": 0.2, "batch": 20}}
    with tempfile.TemporaryDirectory() as name:
        run = configured(Path(name), "fedavg", **terms, **more)
        return cast(Poison, poison(run, Poisoning(poison=kind, share=LIARS / 10, aggregate=rules)))


def inverted(images: int) -> list[Figure]:
    """Row 21: so many digits, reconstructed from what methods upload of a LeNet."""
    found = []
    terms = {"rounds": 1, "clients": 4, "partition": "iid", "samples": "30/10"}
    for method, noise in [("fedavg", NOISE), *((method, 0.0) for method in INVERTED)]:
        # prototypes are of features, which a LeNet has not
        model = {} if method == "fedproto" else {"model": "lenet"}
        with tempfile.TemporaryDirectory() as name:
            run = configured(Path(name), method, **terms, **model, parameters={"batch": 30})
            try:
                result = attack(run, Attacking(images=images, iterations=60, noise=noise))
            except UserError as error:  # the attack does not apply
                found.append(Figure(method, str(error), "", None))
                continue
        mean = result["psnr_mean"]
        what = f"{method}, {result['observed_values']:,} of {result['values']:,} values seen"
        goal, met = "", None
        if noise:
            what += f", with noise of variance {noise:g}"
            goal, met = "at most 10 dB", mean is not None and mean <= 10
        elif method == "fedavg":
            what += ": the control"
            goal, met = "at least 25 dB, or the test is void", mean is None or mean >= 25
        found.append(Figure(what, "exact" if mean is None else f"{mean:.1f} dB", goal, met))
    return found


def imprinted(_: int) -> list[Figure]:
    """Row 27: digits read off by a first layer made for it, in clear and in the sum of ten clients, of 14 samples each
    in one local epoch."""
    terms = {"rounds": 1, "clients": 10, "partition": "iid", "samples": "14/5", "model": "mlp"}
    with tempfile.TemporaryDirectory() as name:
        run = configured(Path(name), "fedavg", **terms, parameters={"batch": 14, "epochs": 1, "lr": 0.1})
        result = imprint(run)
        task = find(experiment_of(run)).task
        adapted = drift_of(task.problem, 0, hidden(task, imprinted_model(task)[0]))
        longer = terms | {"rounds": 20, "samples": "100/20"}
        honestly = {"batch": 14, "epochs": 1, "lr": 0.1}
        trained = configured(Path(name) / "honest", "fedavg", **longer, parameters=honestly)
        honest = drift_of(task.problem, 0, load_model(trained).state_dict())
    drift = result["first_layer_drift"]
    images, control = result["images"], result["control"] / result["control_images"]
    return [
        Figure(
            f"of {images} images, reconstructed from each update by a first layer built for it",
            f"{result['in_clear']}",
            "",
            None,
        ),
        Figure("the same from their sum, all that --secure-aggregation reveals", f"{result['in_a_sum']}", "", None),
        Figure("control: one step of one client", f"{control:.0%}", "at least 30 %, or it is void", control >= 0.3),
        Figure("how far that layer has turned from the agreed one", f"{drift:.2f}", "above max-drift 0.9", drift > 0.9),
        Figure(
            "the same, least, for a layer that keeps half of its units and shrinks the others to a twentieth",
            f"{adapted:.2f}",
            "above max-drift 0.9",
            adapted > 0.9,
        ),
        Figure("the same for honest training of this network, 20 rounds", f"{honest:.2f}", "below 0.9", honest < 0.9),
    ]


def inferred(shadows: int) -> list[Figure]:
    """Row 22: digits, the global model of two clients of 180 samples, with so many shadow models."""
    plain = told(PLAIN, shadows)
    private = told(PRIVATE, shadows, dp=f"of=samples,epsilon={EPSILON:g},delta={DELTA:g},clip=1.0,noise=seeded")
    most = math.exp(EPSILON) * FALSE_ALARMS + DELTA
    found = []
    for control, row in zip(plain, private, strict=True):
        name, auc = control["attack"], control["control_auc"]
        goal = f"at least {CONTROL_AUC:.2f}, or the test is void"
        found += [
            Figure(f"{name}, an overfitted model: the control's AUC", f"{auc:.2f}", goal, auc >= CONTROL_AUC),
            Figure(f"{name}, fedavg: AUC", f"{control['auc']:.2f}", "", None),
            Figure(f"{name}, fedavg: TPR at 1 % FPR", _percent(control["tpr"]), "", None),
        ]
        private_ones = f"{name}, fedavg with epsilon {EPSILON:g} of samples"
        goal = f"at most e^epsilon FPR + delta, {_percent(most)}"
        found += [
            Figure(f"{private_ones}: AUC", f"{row['auc']:.2f}", "at most 0.55", row["auc"] <= 0.55),
            Figure(f"{private_ones}: TPR at 1 % FPR", _percent(row["tpr"]), goal, row["tpr"] <= most),
        ]
    return found


def told(parameters: dict[str, Any], shadows: int, **more: Any) -> list[dict[str, Any]]:
    """How well each attack tells members of a FedAvg run on few samples from others."""
    with tempfile.TemporaryDirectory() as name:
        run = configured(Path(name), "fedavg", **FEW, **more, parameters=parameters)
        attacks: list[dict[str, Any]] = membership(run, Inferring(shadows=shadows))["attacks"]
        return attacks


def _percent(part: float | None) -> str:
    return "diverges" if part is None else f"{part:.1%}"
