"""Settings of what is done to finished runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from fewbytes.base.errors import UserError
from fewbytes.base.ranges import Count, NotNegative, Positive, Several, Whole
from fewbytes.base.settings import Group, Text, reads_text, setting
from fewbytes.core.rules import Rule

Rules = Annotated[
    tuple[Rule, ...],
    Text(
        "rules with commas",
        lambda text: tuple(Rule.read(part) for part in text.split(",") if part.strip()),
        lambda rules: ",".join(map(str, rules)),
    ),
]


@dataclass(frozen=True)
class Probing(Group):
    """How probes are trained; the paper's values. Raises UserError for values that cannot be."""

    title: ClassVar[str] = "Probes"

    epochs: Count = setting(160, "Epochs of decoders and auxiliary networks; lr falls along a cosine.")
    linear_epochs: Count = setting(10, "Epochs of the linear layers; lr stays.")
    samples: Several | None = setting(None, "Train probes on at most so many samples (default: all).")
    batch: Several = setting(128, "Samples of a batch.")
    lr: Positive = setting(0.01, "Learning rate.")
    seed: int = setting(0, "Same seed, same figures.")


@dataclass(frozen=True)
class Attacking(Group):
    """How images are attacked. Raises UserError for values that cannot be."""

    title: ClassVar[str] = "Gradient inversion"

    client: Whole = setting(0, "Whose training images; with --membership, whose own model.")
    model: str = setting(
        "lenet", "lenet, resnet18-sigmoid, another model, or run: the one that the run saved.", metavar="NAME"
    )
    images: Count = setting(20, "Number of images, each attacked alone.")
    iterations: Count = setting(300, "Iterations of L-BFGS at most, 20 steps each.")
    restarts: Whole = setting(1, "Further starts where the gradients of one do not match.")
    noise: NotNegative = setting(0.0, "Variance of Gaussian noise on every gradient entry that is observed.")
    seed: int = setting(0, "Same seed, same figures.")


@dataclass(frozen=True)
class Inferring(Group):
    """How members of the training data are told from others. Raises UserError for values that cannot be."""

    title: ClassVar[str] = "Membership inference"

    client: Whole | None = setting(None, "The model of this client, and its samples (default: the global one).")
    shadows: Annotated[int, Meta(ge=4)] = setting(8, "Shadow models of LiRA, half of them trained on a sample.")
    samples: Annotated[int, Meta(ge=100)] = setting(1000, "Members to tell from as many others, at most.")
    seed: int = setting(0, "Same seed, same figures.")


@reads_text
@dataclass(frozen=True)
class Poisoning(Group):
    """How some clients lie. Raises UserError for values that cannot be."""

    title: ClassVar[str] = "Poisoning"

    poison: Literal["scale", "flip", "noise", "labels", "backdoor"] = setting("scale", "How they lie.", option=None)
    share: Annotated[float, Meta(gt=0, lt=1)] = setting(0.2, "Part of the clients that lies.")
    factor: Positive | None = setting(
        None, "What liars' updates are multiplied by (default: 100; labels, backdoor: clients / liars)."
    )
    target: Whole = setting(0, "The class that the trigger stands for.")
    aggregate: Rules = setting((), "Rules to put beside the mean, with commas.", metavar="RULES")
    seed: int = setting(0, "Same seed, same figures.")


@dataclass(frozen=True)
class Imprinting(Group):
    """How images are read off by a first layer made for it. Raises UserError for values that cannot be."""

    title: ClassVar[str] = "Imprinted first layer"

    clients: Count = setting(10, "The clients that the server hears, the first so many.")


def attack_of(given: dict[str, Any]) -> Attacking | Inferring | Poisoning | Imprinting:
    """The attack that settings, as the command line has them, are of: poisoning if a lie is named, membership inference
    or an imprinted first layer if that is, else gradient inversion. Raises UserError for settings of another."""
    named = [kind for kind in ("membership", "imprint") if given.pop(kind, False)] + ["poison"] * ("poison" in given)
    if len(named) > 1:
        raise UserError(f"one attack at a time: leave --{named[0]} or --{named[1]} out")
    group: type[Attacking | Inferring | Poisoning | Imprinting] = Attacking
    if named:
        group = {"membership": Inferring, "imprint": Imprinting, "poison": Poisoning}[named[0]]
    if others := sorted(given.keys() - group.declared().keys()):
        raise UserError(f"--{others[0]} is no setting of {group.title.lower()}: leave it out, or name its attack")
    return group.read(given)
