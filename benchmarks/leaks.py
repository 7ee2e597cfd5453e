"""Measures what methods leak, and whether clients can lie in them: docs/leaks.md, and a paragraph in their cards.

    python benchmarks/leaks.py [fedavg fedrep]

Every attack of `fewbytes attack` on a run of each method on the digits, a minute or two a method. Results are kept in
docs/leaks.json, of which page and cards are made: methods that are not named stay as they were.
"""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
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
    "fedadam": {},
    "fedyogi": {},
    "fedbuff": {"concurrency": 5, "buffer": 3},
    "scaffold": {},
    "fedper": {},
    "ditto": {},
    "pfedsd": {},
    "fedcac": {},
    "lg_fedavg": {},
    "fedcom": {},
    "dgc": {},
    "fedcams": {},
    "fedbn": {"model": "resnet4:width=4"},
    "fedrep": {},
    "fedproto": {},
    "feddistill": {},
    "fedpurin": {"beta": 20},
    "genefl": {"clusters": 1, "fraction": 1.0},
    "fedkgf": {"model": "resnet4:width=8", "base": 4},
    "fusefl": {"model": "mlp:layers=4", "epochs": 20, "lr": 0.01, "ccvr_samples": 500},
    "fedktl": {"server_epochs": 10},
}
"""By method its model, where not the usual one, and what of its settings is not as in LOCAL or its default."""
FACTORS = (None, 1.0)
"""What liars of a backdoor multiply their update by, clients / liars or nothing: they take what succeeds better."""
NONE, LEAKS = "does not apply", "**What it leaks**"
SAYS = {
    "dgc": "the 32nd part of its change",
    "fedcams": "signs of its change",
    "fedproto": "mean features of classes, no model",
    "feddistill": "mean logits of classes, no model",
    "fedkgf": "another group of layers each round",
    "fusefl": "blocks after all training, once, which stay apart",
    "fedktl": "a mean vector for each class, no model",
}
"""Of methods to which an attack does not apply what they send."""
Results = dict[str, dict[str, Any]]
"""By method and attack what it came to, or why it does not apply."""
PAGE = """# What each method leaks, and what a lying client does to it

Made by `python benchmarks/leaks.py` from `leaks.json`: every figure is measured, on one small run of each method,
the digits dealt out evenly to {clients} clients, 180 samples each, {rounds} rounds of {epochs} epochs (lr {lr},
batch {batch}, an MLP; where a method needs other terms, the script has them), seed 0. `fewbytes attack RUN` says the
same of a run of yours; on other data figures differ. [Who is trusted with what](threat-model.md).

Every attack stands beside a **control**, in parentheses, which must succeed. Where it fails the figure is void,
and says nothing of the method. A low figure says that these attacks found little, not that none would find more.

| method | images | members | accuracy with one liar | backdoor |
| --- | --- | --- | --- | --- |
{rows}

- **Images**: gradient inversion (iDLG) of one image at a time, from what the method uploads of a LeNet of random
  weights (8,026 values), the worst case for a client: the peak signal-to-noise ratio, a mean of three; from 25 dB
  on an image counts as recognised. The control is the gradient of all values. GENE-FL is attacked at its smallest
  learnGene; its first rounds upload every layer. Of FedPURIN the critical values are seen, and the model that training
  began with is known, as the server sent it.
- **Members** of the training data told from test samples by LiRA, with eight shadow models, in the model that the
  run saves: the global one, or client 0's own. AUC 0.50 is guessing, and chance alone
  moves it by 0.03; TPR is at 1 % FPR. The control is such a model overfitted to 50 samples: its AUC must reach
  0.60.
- **Accuracy**, by the method's own headline, where all are honest, and where one of five sends 100 times its
  update; honest clients' where their own models are judged. The control is FedAvg, which must lose 20 points.
- **Backdoor**: half of the liar's images have a bright corner and are called class 0, and its update is multiplied
  by five, or by one, whichever succeeds better. Success is the share of other images that are taken for 0 once they
  have the corner. The control is FedAvg, in which it must succeed in 80 %.

Where an attack does not apply, the method sends no values of a model, of which this attack makes or takes gradients, or
in which this liar lies. That is no promise: means, changes and blocks can be lied in, and tell something, too.

What bears liars: [aggregation.md](aggregation.md). What hides members: [privacy.md](privacy.md). Both are measured
in rows 19 to 22 of [hardening.md](hardening.md).
"""


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
    rows = [
        "| " + " | ".join([f"[{method}](methods/{method}.md)", *cells(method, results).values()]) + " |"
        for method in METHODS
        if method in results
    ]
    return PAGE.format(rows="\n".join(rows), **TERMS, **LOCAL)


def card(method: str, results: Results, text: str) -> str:
    """A method's card with what it leaks, as a paragraph at its end or where it stands."""
    told = "; ".join(f"{what}: {figure}" for what, figure in cells(method, results).items())
    words = f"{LEAKS}, [measured on the digits](../leaks.md), controls in parentheses. {told[0].upper()}{told[1:]}."
    written = textwrap.fill(words, 118, break_on_hyphens=False)
    before, found, after = text.partition(LEAKS)
    if not found:
        return f"{text.rstrip()}\n\n{written}\n"
    _, blank, rest = after.partition("\n\n")
    return before + written + (blank + rest if blank else "\n")


def cells(method: str, results: Results) -> dict[str, str]:
    """What each attack on a method came to, beside its control."""
    found, control = results[method], results["fedavg"]
    (lira,) = [each for each in found["membership"]["attacks"] if each["attack"] == "LiRA"]
    if isinstance(found["inversion"], str):
        images = f"{NONE}, it sends {SAYS[method]}"
    else:
        seen = found["inversion"]["observed_values"] / found["inversion"]["values"]
        reached, whole = (decibels(each["inversion"]["psnr_mean"]) for each in (found, control))
        images = f"{reached} ({whole}) from {percent(seen)} of the values"
    told = {
        "images": images,
        "members": ("void: " if lira["void"] else "")
        + f"AUC {lira['auc']:.2f} ({lira['control_auc']:.2f}), TPR {percent(lira['tpr'])}",
    }
    for kind, key, what in (("scale", "accuracy", "accuracy with one liar"), ("backdoor", "success", "backdoor")):
        told[what] = NONE
        if not isinstance(found[kind], str):
            figure, instead = _lied(found[kind], key), f", honest {percent(found[kind]['clean'][key])}"
            void = "" if succeeds(control[kind]) else "void: "
            told[what] = f"{void}{figure} ({_lied(control[kind], key)})" + (instead if key == "accuracy" else "")
    return told


def _lied(result: Mapping[str, Any], key: str) -> str:
    liars = result["poisoned"][0]
    return "diverges" if liars["accuracy"] is None else percent(liars[key])


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    file = DOCS / "leaks.json"
    results: Results = json.loads(file.read_text()) if file.exists() else {}
    for method in sys.argv[1:] or METHODS:
        results[method] = measured(method)
        file.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(method, cells(method, results), flush=True)
        file_of_card = DOCS / "methods" / f"{method}.md"
        file_of_card.write_text(card(method, results, file_of_card.read_text()))
    (DOCS / "leaks.md").write_text(page(results))


if __name__ == "__main__":
    main()
