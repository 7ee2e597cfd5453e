"""Measures what methods leak, and what malicious clients do to them: docs/leaks.md, and a paragraph on their pages.

    python benchmarks/leaks.py [fedavg fedrep]

Every attack of `fewbytes attack` on a run of each method on the digits, a minute or two a method. Results are kept in
docs/leaks.json, from which all pages are made: methods that are not named keep their results.
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
ASSET = DOCS.parent / "src" / "fewbytes" / "report" / "assets" / "leaks.json"
TERMS = {"rounds": 10, "clients": 5, "partition": "iid", "samples": "180/60"}
LOCAL = {"epochs": 4, "lr": 0.1, "batch": 20}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fednova": {},
    "fedprox": {},
    "fedadam": {},
    "fedyogi": {},
    "fedbuff": {"concurrency": 5, "buffer": 3},
    "scaffold": {},
    "feddyn": {},
    "moon": {},
    "fedper": {},
    "ditto": {},
    "pfedme": {"steps": 0},
    "fedala": {},
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
"""By method: its model, if not the usual one, and settings that differ from LOCAL and its defaults."""
FACTORS = (None, 1.0)
"""Factors of a backdoor's update, clients / malicious clients or none: the better one is reported."""
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
"""What the methods send to which an attack does not apply."""
Results = dict[str, dict[str, Any]]
"""By method and attack: its result, or why it does not apply."""
PAGE = """# What each method leaks

What can attacks learn from what a client sends, and what can one malicious client do? `fewbytes attack RUN` measures
it for your own run. Here it is measured on one small run of each method: the digits, split evenly among {clients}
clients with 180 samples each, {rounds} rounds of {epochs} epochs (lr {lr}, batch {batch}, an MLP), seed 0. On other
data, figures differ. `python benchmarks/leaks.py` makes this page from `leaks.json`, and lists the methods that need
other settings. See the [threat model](threat-model.md) and the [glossary](glossary.md).

Every attack has a **control**, in parentheses, which must succeed. If it fails, the figure is void and says nothing
about the method. A low figure means that these attacks found little, not that no attack would find more.

| method | images | members | accuracy with one malicious client | backdoor |
| --- | --- | --- | --- | --- |
{rows}

- **Images**: gradient inversion (iDLG) of one image at a time, from the method's upload of a LeNet with random weights
  (8,026 values), the worst case for a client. The figure is the peak signal-to-noise ratio, a mean of three images; an
  image counts as recognised from 25 dB. The control is the gradient of all values. GENE-FL is attacked at its
  smallest learnGene; its first rounds upload every layer. For FedPURIN, the attacker sees the critical values and knows
  the model at the start of training, as the server sent it.
- **Members** of the training data are separated from test samples by LiRA (8 shadow models). It attacks the model
  that the run saves: the global one, or client 0's own. AUC 0.50 is guessing, and chance alone moves it by 0.03; TPR
  is at 1 % FPR. The control is such a model overfitted to 50 samples: its AUC must reach 0.60.
- **Accuracy** is the method's headline score when all clients are honest, and when one of five sends 100 times its
  update. For clients' own models, it is that of the honest clients. The control is FedAvg, which must lose 20 points.
- **Backdoor**: half of the malicious client's images have a bright corner and are labelled class 0. Its update is
  multiplied by five, or by one, whichever succeeds better. Success is the fraction of other images that are classified
  as 0 once they have the corner. The control is FedAvg, in which it must succeed in 80 %.

An attack "does not apply" if the method sends no model values: this attack needs them to compute gradients, or to send
false ones. This is not a promise: means, changes and blocks can be falsified, and reveal something, too.

For rules that tolerate malicious clients, see [robust aggregation](aggregation.md); for hiding members, see
[privacy](privacy.md). Rows 19 to 22 of [Hardening](hardening.md) measure both.
"""


def measured(method: str) -> dict[str, Any]:
    """The result of each attack on a run of a method, or why it does not apply."""
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


def asset(results: Results) -> str:
    """The figures that the page about what left quotes, by method (`fewbytes.report.audit`)."""
    found = {method: cells(method, results) for method in sorted(results)}
    quoted = {method: {what: each[what] for what in ("images", "members")} for method, each in found.items()}
    return json.dumps(quoted, indent=1) + "\n"


def card(method: str, results: Results, text: str) -> str:
    """A method's page with its paragraph on leaks, replaced in place or appended."""
    told = "; ".join(f"{what}: {figure}" for what, figure in cells(method, results).items())
    words = f"{LEAKS}, [measured on the digits](../leaks.md), controls in parentheses. {told[0].upper()}{told[1:]}."
    written = textwrap.fill(words, 118, break_on_hyphens=False)
    before, found, after = text.partition(LEAKS)
    if not found:
        return f"{text.rstrip()}\n\n{written}\n"
    _, blank, rest = after.partition("\n\n")
    return before + written + (blank + rest if blank else "\n")


def cells(method: str, results: Results) -> dict[str, str]:
    """The result of each attack on a method, with its control."""
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
    for kind, key, what in (
        ("scale", "accuracy", "accuracy with one malicious client"),
        ("backdoor", "success", "backdoor"),
    ):
        told[what] = NONE
        if not isinstance(found[kind], str):
            figure, instead = _attacked(found[kind], key), f", honest {percent(found[kind]['clean'][key])}"
            void = "" if succeeds(control[kind]) else "void: "
            told[what] = f"{void}{figure} ({_attacked(control[kind], key)})" + (instead if key == "accuracy" else "")
    return told


def _attacked(result: Mapping[str, Any], key: str) -> str:
    poisoned = result["poisoned"][0]
    return "diverges" if poisoned["accuracy"] is None else percent(poisoned[key])


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
    ASSET.write_text(asset(results))


if __name__ == "__main__":
    main()
