"""The terms on which `fewbytes compare all` compares every method: equal local training, and not much of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from fewbytes.methods import METHODS

TERMS: dict[str, Any] = {"model": "resnet8:width=8,stem=3x3", "rounds": 6, "public": 100}
"""Settings of the experiment, unless they are given: a model that every method can train, samples for the servers that
distil, which no client then has."""
TRAINING: dict[str, Any] = {"fraction": 1.0, "epochs": 2, "lr": 0.1, "batch": 20, "momentum": 0.9}
"""Hyper-parameters of local training, for the methods that have them."""
SERVERS: dict[str, dict[str, Any]] = {
    "fusefl": {"ccvr_samples": 500},
    "feddf": {"server_steps": 300, "server_batch": 50},
    "dense": {"server_epochs": 10, "generator_steps": 3, "server_batch": 32, "latent": 32},
    "feddafl": {"server_steps": 60, "student_steps": 2, "server_batch": 32, "latent": 32},
    "fedadi": {"server_epochs": 2, "pixel_steps": 20, "server_steps": 60, "server_batch": 32},
    "fedktl": {"server_epochs": 10},
}
"""Hyper-parameters of servers whose papers let them work for hours."""


def equal_parameters(name: str, rounds: int) -> dict[str, Any]:
    """The parameters of a method on these terms; who trains but once trains as many epochs as the others in all."""
    cls = METHODS[name]
    fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    parameters = {key: value for key, value in TRAINING.items() if key in fields} | SERVERS.get(name, {})
    if cls().own_rounds and "epochs" in fields:
        parameters["epochs"] *= rounds
    return parameters


def told(rounds: int) -> str:
    """The terms in words."""
    listed = ", ".join(f"{key} {value:g}" for key, value in TRAINING.items())
    return (
        f"all methods train alike: {listed}, {rounds} rounds (one-shot methods: {TRAINING['epochs'] * rounds} epochs), "
        "and servers that generate or distil work less than in their papers; --rounds and --set change that"
    )
