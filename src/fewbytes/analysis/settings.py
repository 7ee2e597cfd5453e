"""Settings of probes of and attacks on finished runs."""

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
    """How probes are trained; defaults from the paper. Raises UserError for invalid values."""

    title: ClassVar[str] = "Probes"

    epochs: Count = setting(160, "Epochs for decoders and auxiliary networks (cosine learning rate).")
    linear_epochs: Count = setting(10, "Epochs for linear layers (constant learning rate).")
    samples: Several | None = setting(None, "Maximum number of samples to train probes on (default: all).")
    batch: Several = setting(128, "Batch size.")
    lr: Positive = setting(0.01, "Learning rate.")
    seed: int = setting(0, "Random seed; the same seed gives the same figures.")


@dataclass(frozen=True)
class Attacking(Group):
    """How images are attacked. Raises UserError for invalid values."""

    title: ClassVar[str] = "Gradient inversion"

    client: Whole = setting(0, "Client whose training images are attacked; with --membership, whose own model.")
    model: str = setting(
        "lenet", "Model: lenet, resnet18-sigmoid, another model, or run (the run's saved model).", metavar="NAME"
    )
    images: Count = setting(20, "Number of images, attacked one at a time.")
    iterations: Count = setting(300, "Maximum number of L-BFGS iterations, 20 steps each.")
    restarts: Whole = setting(1, "Number of restarts if the gradients do not match.")
    noise: NotNegative = setting(0.0, "Variance of Gaussian noise on every observed gradient entry.")
    seed: int = setting(0, "Random seed; the same seed gives the same figures.")


@dataclass(frozen=True)
class Inferring(Group):
    """How membership in the training data is inferred. Raises UserError for invalid values."""

    title: ClassVar[str] = "Membership inference"

    client: Whole | None = setting(None, "Client whose model and samples are attacked (default: the global model).")
    shadows: Annotated[int, Meta(ge=4)] = setting(8, "Number of LiRA shadow models; half are trained on a sample.")
    samples: Annotated[int, Meta(ge=100)] = setting(1000, "Maximum number of members, and of non-members, to test.")
    seed: int = setting(0, "Random seed; the same seed gives the same figures.")


@reads_text
@dataclass(frozen=True)
class Poisoning(Group):
    """How malicious clients behave. Raises UserError for invalid values."""

    title: ClassVar[str] = "Poisoning"

    poison: Literal["scale", "flip", "noise", "labels", "backdoor"] = setting("scale", "Kind of attack.", option=None)
    share: Annotated[float, Meta(gt=0, lt=1)] = setting(0.2, "Fraction of clients that are malicious.")
    factor: Positive | None = setting(
        None, "Factor on malicious updates (default: 100; labels, backdoor: clients / malicious clients)."
    )
    target: Whole = setting(0, "Class that the backdoor trigger stands for.")
    aggregate: Rules = setting((), "Aggregation rules to compare with the mean, comma-separated.", metavar="RULES")
    seed: int = setting(0, "Random seed; the same seed gives the same figures.")


@dataclass(frozen=True)
class Imprinting(Group):
    """How images are read off with a manipulated first layer. Raises UserError for invalid values."""

    title: ClassVar[str] = "Imprinted first layer"

    clients: Count = setting(10, "Number of clients that the server reads, the first ones.")


def attack_of(given: dict[str, Any]) -> Attacking | Inferring | Poisoning | Imprinting:
    """The attack that the command line's options select: poisoning, membership inference, an imprinted first layer, or
    else gradient inversion. Raises UserError for options of another attack."""
    named = [kind for kind in ("membership", "imprint") if given.pop(kind, False)] + ["poison"] * ("poison" in given)
    if len(named) > 1:
        raise UserError(f"one attack at a time: leave --{named[0]} or --{named[1]} out")
    group: type[Attacking | Inferring | Poisoning | Imprinting] = Attacking
    if named:
        group = {"membership": Inferring, "imprint": Imprinting, "poison": Poisoning}[named[0]]
    if others := sorted(given.keys() - group.declared().keys()):
        raise UserError(f"--{others[0]} is not a setting of {group.title.lower()}: leave it out, or name its attack")
    return group.read(given)
