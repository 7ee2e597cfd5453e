"""What one and three malicious clients of ten do to FedAvg and five systems, under the mean and under a robust rule.

    python benchmarks/hardening/malicious.py  (prints a table in Markdown, and writes docs/malicious.json)

Digits, ten clients, Dirichlet alpha 1. `sign`: updates turned round. `x30`: 30 times as long. `backdoor`: trained on
images of which half have a trigger, half as long as an honest update. `colluding`: the same for all of them, just below
the length of an honest one. An update starts from what the client was sent; where it was sent no model, from 0.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from figures import Figure
from torch import Tensor

import fewbytes as fb
from fewbytes.analysis.poisoning import figures, poisoned
from fewbytes.analysis.settings import Poisoning
from fewbytes.base.errors import FewbytesError
from fewbytes.core.rules import Rule
from fewbytes.experiments.run import run_with
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import Found, find
from fewbytes.methods.parts.ccvr import ClassStatistics
from fewbytes.running.run import Run
from fewbytes.wire.value import entries_of

State = dict[str, Tensor]
FILE = Path(__file__).parents[2] / "docs" / "malicious.json"
BACKDOOR = Poisoning(poison="backdoor")
MALICIOUS = {1: (3,), 3: (3, 5, 7)}
KINDS = "sign", "x30", "backdoor", "colluding"
FACTORS = {"sign": -1.0, "x30": 30.0}
SHORT, BELOW = 0.5, 0.95  # of an honest update's norm
TERMS: dict[str, Any] = {"epochs": 2, "lr": 0.1, "batch": 20, "last": "kept"}


class System(NamedTuple):
    """How a method is measured: on which model, for how many rounds, by which rule, and by what else of its own."""

    model: str
    rounds: int
    rule: str
    parameters: Mapping[str, Any]


SYSTEMS = {
    "fedavg": System("mlp:hidden=32", 8, "trimmed-mean=0.3", {"lr": 0.2}),
    "fedpurin": System("mlp:hidden=32", 8, "median", {"beta": 8}),
    "genefl": System("mlp:hidden=32", 8, "norm-clip", {"lr": 0.02, "momentum": 0.9, "clusters": 2, "fraction": 1.0}),
    "fedkgf": System(
        "resnet4:width=8,stem=3x3", 40, "norm-clip", {"lr": 0.05, "lr_rounds": 0, "base": 4, "common": True}
    ),
    "fusefl": System(
        "mlp:layers=2,hidden=32", 2, "median", {"lr": 0.02, "epochs": 40, "blocks": 2, "ccvr_samples": 100}
    ),
    "fedktl": System("mlp:hidden=32", 3, "median", {"epochs": 4, "server_epochs": 4, "momentum": 0.9}),
}
RULES = "median", "trimmed-mean=0.3", "krum=3", "multi-krum=3", "norm-clip", "geometric-median"
ALPHAS = 0.1, 0.3, 0.5, 1.0


class Notes(fb.Watcher):
    """In which round each client was named."""

    def __init__(self) -> None:
        self.rounds: dict[int, int] = {}

    def note(self, text: str) -> None:
        if found := re.match(r"round (\d+): client (\d+) (?:sends|pulls)", text):
            self.rounds[int(found[2])] = int(found[1])


def lying(method: fb.Method, malicious: tuple[int, ...], kind: str) -> fb.Method:
    """The method, of which these clients lie in every reply."""
    cls, shared = type(method), dict[Any, Any]()
    names = [h.name for h in cls.handlers() if h.reply is not None and h.name != "describe"]
    lies = {name: lie(getattr(cls, name), malicious, kind, shared) for name in names}
    made: type[fb.Method] = type(cls.__name__, (cls,), {"__module__": cls.__module__, **lies})
    return made(**{f.name: getattr(method, f.name) for f in dataclasses.fields(method)})  # type: ignore[arg-type]


def lie(
    handler: Callable[..., Any], malicious: tuple[int, ...], kind: str, shared: dict[Any, Any]
) -> Callable[..., Any]:
    """A handler whose replies these clients falsify; what the first of them that collude sends in a round, all do."""

    @functools.wraps(handler)
    def lied(self: fb.Method, state: Any, message: Any, site: fb.Site) -> Any:
        if site.me not in malicious:
            return handler(self, state, message, site)
        start = entries_of(getattr(message, "theta", None))
        if kind in FACTORS:
            return changed(handler(self, state, message, site), lambda s: along(s, start, FACTORS[kind]))
        honest = handler(self, copy.deepcopy(state), message, site)  # what it would have sent, for its length
        clean, site.train = site.train, poisoned(site.train, BACKDOOR, len(site.problem.classes))
        reply = handler(self, state, message, site)
        if getattr(reply, "samples", None) is not None:
            reply = dataclasses.replace(reply, samples=len(clean))
        site.train = clean
        lengths = iter(lengths_of(honest, start))
        part = SHORT if kind == "backdoor" else BELOW

        def scaled(told: State) -> State:
            length = length_of(told, start)
            told = along(told, start, part * next(lengths, length) / max(length, 1e-12)) if start else told
            where = handler.__name__, site.round, tuple(told)
            if kind == "colluding" and all(told[n].shape == v.shape for n, v in shared.get(where, told).items()):
                return shared.setdefault(where, told)
            return told

        return changed(reply, scaled)

    return lied


def along(told: State, start: Mapping[str, Tensor], factor: float) -> State:
    """A multiple of an update; counters stay."""
    moved = {}
    for name, value in told.items():
        at = start.get(name, torch.zeros(())).double()
        moved[name] = (at + factor * (value.double() - at)).to(value.dtype) if value.is_floating_point() else value
    return moved


def length_of(told: State, start: Mapping[str, Tensor]) -> float:
    """An update's norm."""
    return float(sum((v.double() - start.get(n, 0)).square().sum() for n, v in told.items()) ** 0.5)  # type: ignore[operator]


def lengths_of(reply: Any, start: Mapping[str, Tensor]) -> list[float]:
    """The norms of the updates in a reply."""
    found: list[float] = []

    def seen(told: State) -> State:
        found.append(length_of(told, start))
        return told

    changed(reply, seen)
    return found


def changed(value: Any, how: Callable[[State], State]) -> Any:
    """A reply with other values of what is learnt: models, parts of models, vectors, statistics."""
    if isinstance(value, fb.Dense):
        return fb.Dense(how(value.dense()))
    if isinstance(value, fb.Masked):
        return fb.Masked.of(how(value.dense()), value.mask)
    if isinstance(value, ClassStatistics):
        return dataclasses.replace(value, means=changed(value.means, how))
    held = ("theta", "vectors", "branch", "adaptor", "block", "classifier")
    new = {name: changed(getattr(value, name), how) for name in held if getattr(value, name, None) is not None}
    return dataclasses.replace(value, **new)


@functools.cache
def experiment_of(name: str, alpha: float = 1.0, seed: int = 1) -> Found:
    """Digits, and the system's model."""
    system = SYSTEMS[name]
    how = {"model": system.model, "rounds": system.rounds, "parameters": {**TERMS, **system.parameters}}
    data = {"dataset": "digits", "clients": 10, "partition": "dirichlet", "alpha": alpha, "seed": seed}
    return find(make_experiment({"method": name, **how, **data}))


def run(
    name: str, kind: str = "", malicious: tuple[int, ...] = (), rule: str = "mean", alpha: float = 1.0, seed: int = 1
) -> dict[str, Any]:
    """What a run comes to: the honest clients' accuracy, the backdoor's success, who was named and in which round."""
    system, notes = experiment_of(name, alpha, seed), Notes()
    experiment, task = system.experiment, system.task
    method = lying(experiment.build_method(), malicious, kind) if malicious else experiment.build_method()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = dataclasses.replace(
            experiment.run, out=Path(folder) / "run", workers=1, aggregate=Rule.read(rule), watcher=notes,
            evaluate_every=experiment.run.rounds, about=system.about(),
        )  # fmt: skip
        try:
            result = run_with(Run.of(method, task, settings, experiment.policy))
        except FewbytesError as error:
            return {"accuracy": None, "success": None, "named": notes.rounds, "ended": str(error)[:200]}
        honest = [i for i in range(10) if i not in malicious]
        found: dict[str, Any] = dict(figures(result.folder, method, task, honest, BACKDOOR))
        named = {int(i): notes.rounds.get(int(i), 0) for i in result.summary.get("stands_out", {})}
        left = {x["client"] for row in result.rounds for x in row.get("left_out", ())}
        return found | {"named": named, "refused": sorted(left)}


def measure(honest: int, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Every run of the tables, and so many honest ones; kept in docs/malicious.json as they are made."""
    kept: dict[str, Any] = {"malicious": [], "rules": [], "honest": []}

    def add(table: str, row: dict[str, Any]) -> None:
        kept[table].append(row)
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
        say(f"{table}: {json.dumps(row)}")

    for name, system in SYSTEMS.items():
        for malicious in ((), *MALICIOUS.values()):
            for kind in KINDS if malicious else ("",):
                for rule in ("mean", system.rule):
                    about = {"system": name, "malicious": len(malicious), "kind": kind, "rule": rule}
                    add("malicious", about | run(name, kind, malicious, rule))
    for rule in RULES:
        add("rules", {"rule": rule} | run("fedavg", "colluding", MALICIOUS[3], rule))
    for i in range(honest):
        name, alpha = list(SYSTEMS)[i % len(SYSTEMS)], ALPHAS[i // len(SYSTEMS) % len(ALPHAS)]
        add("honest", {"system": name, "alpha": alpha, "seed": i + 1} | run(name, alpha=alpha, seed=i + 1))
    return kept


def table(kept: Mapping[str, Any]) -> str:
    """The measured tables, in Markdown."""
    rows = {(r["system"], r["malicious"], r["kind"], r["rule"]): r for r in kept["malicious"]}
    lines = [
        "| system, rule | malicious of 10 | accuracy: mean | by the rule | backdoor: mean | by the rule | named |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, system in SYSTEMS.items():
        for number, kind in ((0, ""), *((number, kind) for number in MALICIOUS for kind in KINDS)):
            pair = [
                rows[name, number, kind, rule] for rule in ("mean", system.rule) if (name, number, kind, rule) in rows
            ]
            if len(pair) < 2:
                continue
            accuracy = " | ".join("run ends" if r["accuracy"] is None else f"{r['accuracy']:.1%}" for r in pair)
            backdoor = kind in ("backdoor", "colluding", "")
            success = " | ".join("" if not backdoor or r["success"] is None else f"{r['success']:.1%}" for r in pair)
            cells = f"`{name}`, `{system.rule}`" if not number else "", f"{number} {kind}" if number else "none"
            lines.append(f"| {' | '.join(cells)} | {accuracy} | {success} | {words(pair[1], number)} |")
    lines += ["", "| rule (`fedavg`, 3 colluding) | accuracy | backdoor |", "| --- | --- | --- |"]
    mean = rows.get(("fedavg", 3, "colluding", "mean"))
    for row in [*([mean] if mean else []), *kept["rules"]]:
        lines.append(f"| `{row['rule']}` | {row['accuracy']:.1%} | {row['success']:.1%} |")
    false = [f"{r['system']} (alpha {r['alpha']:g}): {len(r['named'])} named" for r in kept["honest"] if r["named"]]
    lines += ["", f"Of {len(kept['honest'])} honest runs {len(false)} named a client. {'; '.join(false)}".strip()]
    return "\n".join(lines)


def words(row: Mapping[str, Any], number: int) -> str:
    """How many malicious clients were named, in which round at the latest, and how many honest ones."""
    malicious = MALICIOUS.get(number, ())
    named = {int(i): t for i, t in row["named"].items()}
    right, wrong = [t for i, t in named.items() if i in malicious], [i for i in named if i not in malicious]
    parts = [f"{len(right)} of {number}, by round {max(right)}"] if right else ["none"] if number else []
    return ", ".join(parts + ([f"and {len(wrong)} honest" if parts else f"{len(wrong)} honest"] if wrong else []))


def measured(honest: int) -> list[Figure]:
    """What each kind comes to by each system's rule, and false alarms over so many honest runs."""
    kept = measure(honest)
    found, clean = [], {}
    for row in kept["malicious"]:
        if not row["malicious"]:
            clean[row["system"], row["rule"]] = row["accuracy"] or 0.0
            continue
        what = f"{row['system']}, {row['rule']}, {row['malicious']} of 10 {row['kind']}"
        figure = "the run ends" if row["accuracy"] is None else f"{row['accuracy']:.1%}, backdoor {row['success']:.1%}"
        goal, met = "", None
        if row["rule"] != "mean":
            least = clean[row["system"], row["rule"]] - 0.05
            goal, met = f"at least {least:.1%}, backdoor at most 15 %", (row["accuracy"] or 0) >= least
            met = met and (row["success"] or 0) <= 0.15
        found.append(Figure(what, figure, goal, met))
    false = sum(bool(row["named"]) for row in kept["honest"])
    return [*found, Figure(f"{honest} honest runs in which a client was named", str(false), "at most 1", false <= 1)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table(measure(20, lambda text: print(text, file=sys.stderr, flush=True))))
