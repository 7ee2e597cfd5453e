"""Measures what methods leak, and whether clients can lie in them, and writes docs/leaks.md.

    python benchmarks/leaks.py [fedavg fedrep]

Every attack of `fewbytes attack` on a run of each method on the digits, a minute or two a method. Results are kept in
docs/leaks.json, of which the page is made: methods that are not named stay as they were.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from runs import configured

from fewbytes.analysis.attack import attack
from fewbytes.analysis.membership import membership
from fewbytes.analysis.poisoning import poison
from fewbytes.analysis.settings import Attacking, Inferring, Poisoning
from fewbytes.base.errors import UserError
from fewbytes.report.leaks import succeeds
from fewbytes.report.table import decibels, percent

DOCS = Path(__file__).parents[1] / "docs"
TERMS = {"rounds": 10, "clients": 5, "partition": "iid", "samples": "180/60"}
LOCAL = {"epochs": 4, "lr": 0.1, "batch": 20}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {},
    "fedbn": {"model": "resnet4:width=4"},
    "fedrep": {},
    "fedproto": {},
    "feddistill": {},
    "fedpurin": {"beta": 20},
    "genefl": {"clusters": 1, "fraction": 1.0},
    "fedkgf": {"model": "resnet4:width=4"},
    "fusefl": {"epochs": 20, "ccvr_samples": 500},
    "fedktl": {"server_epochs": 10},
}
"""By method its model, where not the usual one, and what of its settings is not as in LOCAL or its default."""
FACTORS = (None, 1.0)
"""What liars of a backdoor multiply their update by, clients / liars or nothing: they take what succeeds better."""
SAYS = {
    "fedproto": "mean features of classes, no model",
    "feddistill": "mean logits of classes, no model",
    "fedkgf": "another group of layers each round, in place of the server's, no mean of them",
    "fusefl": "blocks, of which each client's stay apart, once",
    "fedktl": "a mean vector for each class, no model",
}
"""Of methods to which an attack does not apply what they send."""
Results = dict[str, dict[str, Any]]
"""By method and attack what it came to, or why it does not apply."""


def measured(method: str) -> dict[str, Any]:
    """What each attack on a run of a method comes to, or why it does not apply."""
    more = dict(METHODS[method])
    model = {"model": more.pop("model")} if "model" in more else {}
    with tempfile.TemporaryDirectory() as name:
        run = configured(Path(name), method, **TERMS, **model, parameters=LOCAL | more)
        try:
            inverted: Any = attack(run, Attacking(images=3, iterations=60))
            inverted.pop("attacked")
        except UserError as error:
            inverted = str(error)
        members = membership(run, Inferring(samples=180))
        try:
            scaled: Any = poison(run, Poisoning(poison="scale"))
            tried = [poison(run, Poisoning(poison="backdoor", factor=factor)) for factor in FACTORS]
            backdoor: Any = max(tried, key=lambda result: result["poisoned"][0]["success"] or 0.0)
        except UserError as error:
            scaled = backdoor = str(error)
    return {"inversion": inverted, "membership": members, "scale": scaled, "backdoor": backdoor}


def page(results: Results) -> str:
    """The document, in Markdown."""
    clients, rounds = TERMS["clients"], TERMS["rounds"]
    there = [method for method in METHODS if method in results]
    return "\n".join(
        [
            "# What each method leaks, and what a lying client does to it",
            "",
            "Made by `python benchmarks/leaks.py` from `leaks.json`: every figure is measured, on one small run of each "
            f"method, the digits dealt out evenly to {clients} clients of 180 samples each, {rounds} rounds of "
            f"{LOCAL['epochs']} epochs (lr {LOCAL['lr']}, batch {LOCAL['batch']}), seed 0. `fewbytes attack RUN` says "
            "the same of a run of yours; more, and harder, data leak more. [Who is trusted with what](threat-model.md).",
            "",
            "An attack is judged beside a **control**, which must succeed: the whole gradient, an overfitted model, the "
            "same lie in FedAvg. Where the control fails the figure is void and says nothing of the method. A low figure "
            "says that these attacks, as they are here, found little, not that no attack does.",
            "",
            "| method | images from an upload (control) | members: AUC, TPR at 1 % FPR (control) "
            "| accuracy, with one liar of five | backdoor: success with one liar, without |",
            "| --- | --- | --- | --- | --- |",
            *(row(method, results[method], results["fedavg"]) for method in there),
            "",
            "- **Images**: iDLG from the gradient of one image of what the method uploads of a LeNet of random weights "
            "(8,026 values), the worst case for a client: peak signal-to-noise ratio, mean of three; from 25 dB on an "
            "image counts as recognised. The control is the gradient of all values.",
            "- **Members**: told by LiRA with eight shadow models, of the model that the run saves, the global one or "
            "client 0's own, from as many test samples; 0.50 is guessing, and chance alone moves an AUC by 0.03. The "
            "control is a model overfitted to 100 samples, of the same kind.",
            "- **One liar** sends 100 times its update; accuracy is the honest clients', by the method's own headline. "
            "The control is FedAvg's row: it loses at least 20 points.",
            "- **Backdoor**: half of the liar's images bear a bright corner and are called class 0, and its update is "
            "multiplied by five, or not, whichever succeeds better; success is the share of other classes' images that "
            "are taken for 0 once they bear it. The control is FedAvg's row: it succeeds in at least 80 %.",
            "",
            "What bears liars is in [aggregation.md](aggregation.md), what hides members in [privacy.md](privacy.md), "
            "both measured in [hardening.md](hardening.md), rows 19 to 22.",
            "",
        ]
    )


def row(method: str, found: Mapping[str, Any], control: Mapping[str, Any]) -> str:
    """A method's row of the table."""
    lira = next(each for each in found["membership"]["attacks"] if each["attack"] == "LiRA")
    told = f"{lira['auc']:.2f}, {percent(lira['tpr'])} ({lira['control_auc']:.2f})"
    inverted = found["inversion"]
    images = none = f"does not apply: {SAYS.get(method, 'no model')}"
    if not isinstance(inverted, str):
        seen = inverted["observed_values"] / inverted["values"]
        images = f"{decibels(inverted['psnr_mean'])} of {percent(seen)} of values ({decibels(control['inversion']['psnr_mean'])})"
    cells = [f"[{method}](methods/{method}.md)", images, ("void: " if lira["void"] else "") + told]
    for kind, key in (("scale", "accuracy"), ("backdoor", "success")):
        lied = found[kind]
        if isinstance(lied, str):
            cells.append(none)
            continue
        clean, liars = lied["clean"], lied["poisoned"][0]
        with_liars = "diverges" if liars["accuracy"] is None else percent(liars[key])
        words = f"{percent(clean[key])}, {with_liars}" if kind == "scale" else f"{with_liars}, {percent(clean[key])}"
        cells.append(words if succeeds(control[kind]) else f"void: {words}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    file = DOCS / "leaks.json"
    results: Results = json.loads(file.read_text()) if file.exists() else {}
    for method in sys.argv[1:] or METHODS:
        results[method] = measured(method)
        file.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(row(method, results[method], results["fedavg"]), flush=True)
    (DOCS / "leaks.md").write_text(page(results))


if __name__ == "__main__":
    main()
