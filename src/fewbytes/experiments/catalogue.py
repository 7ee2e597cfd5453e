"""What there is to know of a method before one runs it: its kind, paper, idea, cost, and its parameters."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import described
from fewbytes.core.method import Method, handlers_of
from fewbytes.core.training import Local
from fewbytes.experiments.settings import make_experiment, read_experiment
from fewbytes.methods import METHODS

KINDS = {
    "one model for all": "all clients share one model, updated every round",
    "a model for each client": "each client keeps its own model, meant for its own data",
    "models may differ": "clients may have models of different architectures",
    "one shot": "clients send once, or once per stage; the method sets the number of rounds",
}
"""The kinds of methods, in the order in which they are listed."""
USUAL = {
    "fraction": "part of the clients that takes part in a round",
    "server_lr": "the server's learning rate",
    "server_batch": "samples of a batch at the server",
    "server_epochs": "the server's epochs a round",
    "server_momentum": "of the server's SGD",
    "server_weight_decay": "of the server's parameters",
    "temperature": "by which logits are divided before a model learns from them",
    "latent": "numbers the generator makes an image of",
    "generator_steps": "the generator's steps for each step of the model",
    "lambda_ce": "weight of the cross-entropy of generated images",
    "lambda_bn": "weight of how far batch normalisation's statistics are from the clients'",
    "lambda_adv": "weight of where teacher and student disagree",
    "lambda_oh": "weight of how sure the teacher is",
    "lambda_act": "weight of how large the teacher's features are",
    "lambda_tv": "weight of how rough images are",
    "lambda_l2": "weight of how large pixels are",
    "pixel_lr": "learning rate of the images",
    "beta1": "how much of the mean gradient stays from round to round",
    "beta2": "how much of the mean squared gradient stays from round to round",
    "tau": "what keeps the server's steps from growing where gradients are small",
}
"""What parameters of many methods mean, where the method's own comment is but a symbol, or none."""
_SYMBOL = 8  # characters: a comment of no more names the paper's symbol
_FIELD = re.compile(r"^    (\w+): [^#\n]*#\s*(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter by its plain name: what it may be, its default, and what it means (empty: not said)."""

    name: str
    kind: str
    default: Any
    meaning: str


@dataclass(frozen=True)
class About:
    """A method: its kind (of KINDS), what a client sends a round, its paper, idea and cost, its parameters."""

    name: str
    kind: str
    sends: str
    paper: str
    idea: str
    cost: str
    parameters: list[Parameter]


def about(name: str, method: type[Method]) -> About:
    """What is known of a method, from its class and its file's docstring: paper, idea, …, cost, a paragraph each."""
    text = inspect.getdoc(inspect.getmodule(method)) or ""
    parts = [" ".join(part.split()) for part in text.split("\n\n")]
    paper, idea, *_, cost = parts if len(parts) > 2 else [*parts, "", ""]
    kinds, meanings = method.kinds(), _meanings(method)
    terms = {each.name for each in dataclasses.fields(Local)}
    parameters = [
        Parameter(key, described(kinds[key]), default, _meaning(key, meanings.get(key, "")))
        for key, default in sorted(method.defaults().items(), key=lambda item: item[0] in terms)  # its own first
    ]
    return About(name, _kind(method), method.promises.sends, paper, idea, cost, parameters)


def payloads(frame: Path) -> dict[str, type[Any]]:
    """The classes of payloads by name: of the method whose run a frame lies in or, of no run's frame and of a method
    that cannot be made here, of every method, but for names that differ from method to method in their fields."""
    try:
        handlers = make_experiment(read_experiment(frame.absolute().parent.parent / "config.toml")).made().handlers()
    except UserError:
        handlers = [handler for method in METHODS.values() for handler in handlers_of(method)]
    found: dict[str, type[Any]] = {}
    differ: set[str] = set()
    for kind in (kind for handler in handlers for kind in (handler.message, handler.reply) if kind is not None):
        other = found.setdefault(kind.__name__, kind)
        if list(typing.get_type_hints(kind).items()) != list(typing.get_type_hints(other).items()):
            differ.add(kind.__name__)
    return {name: kind for name, kind in found.items() if name not in differ}


def _kind(method: type[Method]) -> str:
    if method.promises.models_differ:
        return "models may differ"
    if method().own_rounds:
        return "one shot"
    return "one model for all" if method.promises.headline == "global" else "a model for each client"


def _meaning(key: str, comment: str) -> str:
    usual = USUAL.get(key, "") if len(comment) <= _SYMBOL else ""
    return f"{comment}: {usual}" if comment and usual else comment or usual


def _meanings(method: type[Method]) -> dict[str, str]:
    """What the comments beside the fields of a method, and of local training, say."""
    found: dict[str, str] = {}
    for each in (Local, *reversed(method.__mro__)):
        if each.__module__ != "builtins" and issubclass(each, Method | Local):
            found |= dict(_FIELD.findall(_source(each)))
    return found


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except OSError:  # it was made in no file
        return ""
