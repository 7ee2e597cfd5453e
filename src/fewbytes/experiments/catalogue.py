"""The description of a method: its kind, paper, idea, cost and parameters."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import described
from fewbytes.codec.states import KINDS as CODEC
from fewbytes.codec.stream import Versions
from fewbytes.core.method import Method, handlers_of
from fewbytes.core.training import Local
from fewbytes.experiments.config_file import read_experiment
from fewbytes.experiments.papers import Paper, papers_in
from fewbytes.experiments.settings import make_experiment
from fewbytes.methods import METHODS

KINDS = {
    "global model": "all clients share one model, updated every round",
    "personalised models": "each client keeps its own model, meant for its own data",
    "different architectures": "clients may have models of different architectures",
    "one-shot": "clients send once, or once per stage; the method sets the number of rounds",
}
"""The kinds of methods, in the order in which they are listed."""
USUAL = {
    "fraction": "fraction of clients sampled each round",
    "server_lr": "learning rate of the server",
    "server_batch": "batch size of the server",
    "server_epochs": "epochs of the server per round",
    "server_momentum": "momentum of the server's SGD",
    "server_weight_decay": "weight decay of the server's SGD",
    "temperature": "softmax temperature: logits are divided by it before distillation",
    "latent": "dimension of the generator's input",
    "generator_steps": "generator steps per model step",
    "lambda_ce": "weight of the cross-entropy of generated images",
    "lambda_bn": "weight of the distance to the clients' batch-norm statistics",
    "lambda_adv": "weight of the disagreement between teacher and student",
    "lambda_oh": "weight of the one-hot loss, which rewards confident teachers",
    "lambda_act": "weight of the activation loss, which rewards large features of the teacher",
    "lambda_tv": "weight of the total variation of images",
    "lambda_l2": "weight of the squared norm of images",
    "pixel_lr": "learning rate of the images",
    "beta1": "decay rate of the mean gradient",
    "beta2": "decay rate of the mean squared gradient",
    "tau": "added to the denominator of the server's steps, which bounds them for small gradients",
}
"""Descriptions of parameters that many methods have, for methods whose own comment is only a symbol, or missing."""
_SYMBOL = 8  # comments of at most this many characters are the paper's symbol
_FIELD = re.compile(r"^    (\w+): [^#\n]*#\s*(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter: its name, allowed values, default and meaning (empty: undocumented)."""

    name: str
    kind: str
    default: Any
    meaning: str


@dataclass(frozen=True)
class About:
    """A method's kind (of KINDS), what a client sends per round, its paper, idea, cost and parameters; and the papers
    to cite."""

    name: str
    kind: str
    sends: str
    paper: str
    idea: str
    cost: str
    parameters: list[Parameter]
    papers: list[Paper]


def about(name: str, method: type[Method]) -> About:
    """Describe a method, from its class and its file's docstring (paragraphs: paper, idea, …, cost)."""
    text = inspect.getdoc(inspect.getmodule(method)) or ""
    parts = [" ".join(part.split()) for part in text.split("\n\n")]
    paper, idea, *_, cost = parts if len(parts) > 2 else [*parts, "", ""]
    kinds, meanings = method.kinds(), _meanings(method)
    terms = {each.name for each in dataclasses.fields(Local)}
    parameters = [
        Parameter(key, described(kinds[key]), default, _meaning(key, meanings.get(key, "")))
        for key, default in sorted(method.defaults().items(), key=lambda item: item[0] in terms)  # its own first
    ]
    return About(name, _kind(method), method.promises.sends, paper, idea, cost, parameters, [*papers_in(text)])


def payloads(frame: Path, paths: Iterable[str] = ()) -> dict[str, type[Any]]:
    """Payload classes by name, of the method whose run the frame belongs to. For other frames, and methods that cannot
    be made here: of the codec and of all methods, except names that mean different classes in different methods.
    `paths`: of the payload's values, if they are known; classes with other fields are left out."""
    fields = [re.split(r"[.\[]", path)[0] for path in paths]
    codec: dict[str, type[Any]] = {**CODEC, Versions.__name__: Versions}
    try:
        handlers = (
            make_experiment(read_experiment(frame.absolute().parent.parent / "config.toml")).build_method().handlers()
        )
        codec = {}
    except UserError:
        handlers = [handler for method in METHODS.values() for handler in handlers_of(method)]
    found: dict[str, type[Any]] = {}
    differ: set[str] = set()
    for kind in (kind for handler in handlers for kind in (handler.message, handler.reply) if kind is not None):
        if fields and list(typing.get_type_hints(kind)) != list(dict.fromkeys(fields)):
            continue
        other = found.setdefault(kind.__name__, kind)
        if list(typing.get_type_hints(kind).items()) != list(typing.get_type_hints(other).items()):
            differ.add(kind.__name__)
    return {name: kind for name, kind in found.items() if name not in differ} | codec


def _kind(method: type[Method]) -> str:
    if method.promises.models_differ:
        return "different architectures"
    if method().own_rounds:
        return "one-shot"
    return "global model" if method.promises.headline == "global" else "personalised models"


def _meaning(key: str, comment: str) -> str:
    usual = USUAL.get(key, "") if len(comment) <= _SYMBOL else ""
    return f"{comment}: {usual}" if comment and usual else comment or usual


def _meanings(method: type[Method]) -> dict[str, str]:
    """The comments beside the fields of a method and of local training, by field."""
    found: dict[str, str] = {}
    for each in (Local, *reversed(method.__mro__)):
        if each.__module__ != "builtins" and issubclass(each, Method | Local):
            found |= dict(_FIELD.findall(_source(each)))
    return found


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except OSError:  # a class without a file
        return ""
