"""A method says by which rules its server can put replies together: those it can, and no others, in any case."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from cases import CASES, task_of

import fewbytes as fb
from fewbytes.core.rules import EVERY_RULE
from fewbytes.methods.parts.clustered import Clustered

LONG = bool(os.environ.get("FEWBYTES_LONG"))
"""Whether every rule is tried with every method, not one of them."""


@pytest.mark.parametrize("name", CASES)
def test_a_method_has_rules_if_its_server_asks_for_means_of_replies(name, monkeypatch):
    asked = []

    def watched(ask):
        def asking(self, *around, **how):
            asked.append(ask)
            return ask(self, *around, **how)

        return asking

    for what in ("mean", "entry_means", "clipped", "votes"):
        monkeypatch.setattr(fb.Network, what, watched(getattr(fb.Network, what)))
    fb.run(CASES[name], task_of(name), rounds=1, workers=1, save_models=False)
    silent = getattr(CASES[name], "transfer", None) == "conditional"  # clients send nothing
    assert bool(asked) == bool(CASES[name].promises.aggregates and not silent)
    assert CASES[name].promises.aggregates <= EVERY_RULE


@pytest.mark.parametrize("name", [name for name, method in CASES.items() if method.promises.aggregates])
def test_a_method_runs_by_the_rules_it_says(name):
    method = replace(CASES[name], clusters=1) if isinstance(CASES[name], Clustered) else CASES[name]
    rules = sorted(method.promises.aggregates)
    for rule in rules if LONG else random.Random(name).sample(rules, 1):
        text = f"{rule}=0" if "krum" in rule else rule  # then three replies are enough
        result = fb.run(method, task_of(name, clients=6), rounds=2, workers=1, save_models=False, aggregate=text)
        assert result.summary["status"] == "done"
        assert result.summary["aggregate"] == text.replace("trimmed-mean", "trimmed-mean=0.2")


@pytest.mark.parametrize("name", CASES)
def test_other_rules_are_refused_in_one_line_and_nothing_is_written(name, tmp_path):
    for rule in sorted(EVERY_RULE - CASES[name].promises.aggregates):
        with pytest.raises(fb.UserError, match=f"^aggregate {rule}.*: the server of {CASES[name].method_name} takes"):
            fb.run(CASES[name], task_of(name, clients=6), out=tmp_path / "run", aggregate=rule)
    assert not list(tmp_path.iterdir())
