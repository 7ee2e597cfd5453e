"""DiLoCo and others train a small language model from scratch: perplexity over the bytes of both ways.

    python benchmarks/language/diloco.py --tune    # perplexity on validation texts at all rates, for RATES
    python benchmarks/language/diloco.py [--rounds 12] [--steps 15] [--variants "diloco" "fedavg"]

A GPT-2 of 0.4 million random weights, whose tokens are bytes, and four clients with a text each that packages ship: the
Python manual, and the docstrings of numpy, torch and transformers. Each client takes `--steps` steps of AdamW in a
round, whatever the variant. Perplexity is that of the server's model on the held-out tenth of all texts; bytes are
those of the run's ledger, of all clients, up and down.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import fewbytes as fb
from fewbytes.base.state import state_of
from fewbytes.methods.parts.averaging import GlobalModel, Model, Trained, first_shared

sys.path.append(str(Path(__file__).parents[2] / "examples" / "08_language_model"))
from language_model.texts import docstrings

PACKAGES = ("numpy", "torch", "transformers")
LENGTH = 64  # tokens of a sample
TERMS = {"batch": 8, "optimiser": "adamw", "weight_decay": 0.1}
INNER = (1e-3, 3e-3, 1e-2)
OUTER = ((0.7, 0.9), (0.7, 0.6), (1.0, 0.6), (1.0, 0.3))
"""Rates that `--tune` tries: of AdamW; of the server, and its momentum. The first are the paper's."""


@dataclass(frozen=True)
class Relay(fb.Method):
    """One after another: each client trains the model that the one before it sent, and sends it on by the server."""

    local: fb.Local = fb.Local()

    def server(self, problem: fb.Problem) -> GlobalModel:
        return first_shared(problem, problem.first_state())

    def round(self, state: GlobalModel, net: fb.Network, t: int) -> None:
        for client in net.clients:
            for _, reply in net.call(self.train, to=[client], send=Model(fb.Dense(state.theta))):
                state.theta = reply.theta.dense()

    def train(self, state: None, message: Model, site: fb.Site) -> Trained:
        model = site.model(message.theta.dense())
        site.fit(model, self.local)
        return Trained(fb.Dense(state_of(model)), len(site.train))

    def global_model(self, state: GlobalModel, problem: fb.Problem) -> nn.Module:
        return problem.first_model(state.theta)


Variant = tuple[Callable[..., fb.Method], dict[str, Any], dict[str, Any]]
"""A method, its hyper-parameters beside TERMS and RATES, and the run's settings."""
VARIANTS: dict[str, Variant] = {
    "diloco": (fb.DiLoCo, {}, {}),
    "diloco, 2 bits": (fb.DiLoCo, {}, {"uplink_bits": 2, "downlink_bits": 2}),
    "diloco, 0.5 bits": (fb.DiLoCo, {}, {"uplink_bits": 0.5, "downlink_bits": 0.5}),
    "diloco, 2 fragments, 2 bits": (fb.DiLoCo, {"fragments": 2}, {"uplink_bits": 2, "downlink_bits": 2}),
    "fedavg": (fb.FedAvg, {}, {}),
    "one after another": (Relay, {}, {}),
}


RATES: dict[str, tuple[float, ...]] = {
    "diloco": (3e-3, 0.7, 0.9),
    "diloco, 2 bits": (3e-3, 0.7, 0.9),
    "diloco, 0.5 bits": (3e-3, 0.7, 0.9),
    "diloco, 2 fragments, 2 bits": (3e-3, 0.7, 0.9),
    "fedavg": (3e-3,),
    "one after another": (3e-3,),
}
"""AdamW's rate and, of DiLoCo, the server's rate and momentum: the paper's."""


def samples(text: str) -> tuple[Tensor, Tensor]:
    """The text's bytes (n, LENGTH), and those that follow each."""
    tokens = torch.tensor(list(text.encode()))
    n = (len(tokens) - 1) // LENGTH
    return tokens[: n * LENGTH].view(n, LENGTH), tokens[1 : n * LENGTH + 1].view(n, LENGTH)


def task(characters: int, validation: bool) -> fb.Task:
    """A client a text; the last tenth of each is the server's test set, or with `validation` the tenth before it, and
    the last is left out."""
    texts = ["\n\n".join(topics.values())[:characters], *(docstrings(package, characters) for package in PACKAGES)]
    clients, held_out = [], []
    for x, y in map(samples, texts):
        test = len(x) // 10
        if validation:
            x, y = x[:-test], y[:-test]
        clients.append(((x[:-test], y[:-test]), (x[:0], y[:0])))
        held_out.append((x[-test:], y[-test:]))
    test = tuple(torch.cat(parts) for parts in zip(*held_out, strict=True))
    return fb.Task.of(build, clients, test)


def build() -> nn.Module:
    """A GPT-2 of 0.4 million weights, whose tokens are bytes."""
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=96, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def curve(
    variant: Variant, rates: tuple[float, ...], task: fb.Task, rounds: int, steps: int
) -> list[tuple[float, float, float]]:
    """(MB up, MB down, perplexity) after each round; bytes of all rounds so far."""
    cls, parameters, settings = variant
    named = dict(zip(("lr", "server_lr", "server_momentum"), rates, strict=False))
    method = cls(**TERMS, **parameters, **named, steps=steps)
    rows = fb.run(method, task, rounds=rounds, save_models=False, **settings).rounds
    up, down = (list(accumulate(row[f"{way}link_bytes"] / 1e6 for row in rows)) for way in ("up", "down"))
    return [(u, d, row["scores"]["perplexity"]["global"]) for u, d, row in zip(up, down, rows, strict=True)]


def tune(names: list[str], task: fb.Task, rounds: int, steps: int) -> None:
    """Print the perplexity of each variant at all rates, best first."""
    for name in names:
        tried = product(INNER, OUTER) if VARIANTS[name][0] is fb.DiLoCo else product(INNER)
        all_rates = [(each[0], *each[1]) if len(each) > 1 else each for each in tried]
        found = {rates: curve(VARIANTS[name], rates, task, rounds, steps)[-1][2] for rates in all_rates}
        for rates in sorted(found, key=lambda each: found[each]):
            print(f"{name}: {', '.join(f'{rate:g}' for rate in rates)}: {found[rates]:.2f}", flush=True)


def main() -> None:
    """Print the table, a row a variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=15, help="of a client in a round")
    parser.add_argument("--characters", type=int, default=60_000, help="of a client")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--tune", action="store_true", help="print each variant's perplexity at all rates")
    given = parser.parse_args()
    posed = task(given.characters, given.tune)
    if given.tune:
        tune(given.variants, posed, given.rounds, given.steps)
        return
    marks = sorted({given.rounds // 4, given.rounds // 2, given.rounds} - {0})
    heads = ["", "MB up", "MB down", "MB both", *(f"perplexity after {t} rounds (MB both ways)" for t in marks)]
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}", flush=True)
    for name in given.variants:
        points = curve(VARIANTS[name], RATES[name], posed, given.rounds, given.steps)
        cells = [f"{points[t - 1][2]:.2f} ({points[t - 1][0] + points[t - 1][1]:.3g})" for t in marks]
        up, down, _ = points[-1]
        print(f"| {name} | {up:.3g} | {down:.3g} | {up + down:.3g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
