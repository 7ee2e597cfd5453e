"""The report's section on `fewbytes attack`: reconstructed images, inferred members, and runs with malicious clients.

The picture is untrusted: its pixels are decoded and encoded again.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from fewbytes.base.errors import UserError
from fewbytes.base.units import megabytes
from fewbytes.report.folder import RunFolder
from fewbytes.report.records import Attack, Inferred, Membership, Poison, Poisoned
from fewbytes.report.table import decibels, percent

RECOGNISED = 25.0  # dB of PSNR, from which an image counts as reconstructed
CONTROL_AUC = 0.60  # of an overfitted model; below it the attack is void
GUESSING = 0.05  # an AUC this close to 0.5 counts as guessing
CONTROL_SUCCESS, CONTROL_DROP = 0.80, 0.20  # minimum effect on the mean: less is not an attack
DEFENDED_SUCCESS, DEFENDED_BACKDOOR_DROP, DEFENDED_DROP = 0.15, 0.02, 0.03
_FILE_BYTES = 1 << 24  # a larger picture is not shown


@dataclass(frozen=True)
class Leak:
    """Gradient inversion of a run: the result, the share of the network's values seen, its picture (PNG in base64) with
    a text, and a sentence on the control."""

    label: str
    attack: Attack
    seen: float
    picture: str | None
    words: str
    control: str


@dataclass(frozen=True)
class InferredMembers:
    """Membership inference of a run, and sentences about it."""

    label: str
    membership: Membership
    words: list[str]


@dataclass(frozen=True)
class PoisonedRun:
    """A run with malicious clients: the result, its rows, and sentences about it."""

    label: str
    poison: Poison
    rows: list[tuple[str, Poisoned, list[str]]]
    words: list[str]


def inferred(runs: Sequence[RunFolder]) -> list[InferredMembers]:
    """Every run with membership inference."""
    return [
        InferredMembers(run.label, run.membership, membership_words(run.membership)) for run in runs if run.membership
    ]


def poisoned(runs: Sequence[RunFolder]) -> list[PoisonedRun]:
    """Every run that was repeated with malicious clients."""
    return [_poisoned(run.label, run.poison) for run in runs if run.poison]


def _poisoned(label: str, poison: Poison) -> PoisonedRun:
    malicious = f"{len(poison['malicious'])} of {poison['clients']} clients are malicious ({poison['poison']})"
    named = [("honest", poison["clean"]), *((malicious, row) for row in poison["poisoned"])]
    rows = [(who, row, poisoned_bytes(row)) for who, row in named]
    return PoisonedRun(label, poison, rows, poison_words(poison))


def poisoned_bytes(row: Poisoned) -> list[str]:
    """Megabytes up, down and of both directions; a dash for what is not known."""
    up, down = row["uplink_bytes"], row.get("downlink_bytes")
    both = None if up is None or down is None else up + down
    return [megabytes(up), megabytes(down), megabytes(both)]


def inversion_word(control: float | None) -> str:
    """A sentence on the control's PSNR (None: exact)."""
    if control is None or control >= RECOGNISED:
        return f"Control: from all gradients, without noise, an image is reconstructed with {decibels(control)}."
    return f"Void: from all gradients, without noise, an image is reconstructed with only {decibels(control)}."


def membership_words(result: Membership) -> list[str]:
    """A sentence per attack."""
    return [_membership_word(row) for row in result["attacks"]]


def _membership_word(row: Inferred) -> str:
    name, auc, control = row["attack"], f"{row['auc']:.2f}", f"{row['control_auc']:.2f}"
    if row["void"]:
        return f"{name}: void, the overfitted control's AUC is {control}, below {CONTROL_AUC:.2f}."
    if row["auc"] <= 0.5 + GUESSING:
        return f"{name}: members are hardly recognised, AUC {auc} (overfitted control {control})."
    share = f"{percent(row['tpr'])} of them at 1 % false alarms"
    return f"{name}: members are recognised with AUC {auc}, {share} (overfitted control {control})."


def poison_words(result: Poison) -> list[str]:
    """A sentence on the control, and one per rule."""
    backdoor = result["poison"] == "backdoor"
    control, *rules = result["poisoned"]

    def figures(row: Poisoned) -> str:
        instead = f"instead of {percent(result['clean']['accuracy'])}"
        score = "the run diverges" if row["accuracy"] is None else f"accuracy {percent(row['accuracy'])} {instead}"
        refused = f" ({row['refused']} malicious replies refused)" if row["refused"] else ""
        return (f"attack success {percent(row['success'])}, {score}" if backdoor else score) + refused

    if not succeeds(result):
        weak = "succeeds in less than 80 %" if backdoor else "costs less than 20 points"
        return [f"Void: with the mean, {figures(control)}: an attack that {weak} cannot test a rule."]
    words = [f"With the mean the attack succeeds: {figures(control)}."]
    for row in rules:
        withstood = "withstands it" if withstands(result, row) else "does not withstand it"
        words.append(f"{row['rule']} {withstood}: {figures(row)}.")
    return words


def succeeds(result: Poison) -> bool:
    """Whether the attack succeeds against the mean, the control; if not, the test is void."""
    control = result["poisoned"][0]
    if result["poison"] == "backdoor":
        return (control["success"] or 0.0) >= CONTROL_SUCCESS
    return _lost(result, control) >= CONTROL_DROP


def withstands(result: Poison, row: Poisoned) -> bool:
    """Whether a rule keeps the accuracy, and keeps out the backdoor."""
    most = DEFENDED_BACKDOOR_DROP if result["poison"] == "backdoor" else DEFENDED_DROP
    kept = row["accuracy"] is not None and _lost(result, row) <= most + 1e-9
    return kept and (row["success"] or 0.0) <= DEFENDED_SUCCESS


def _lost(result: Poison, row: Poisoned) -> float:
    """Accuracy lost to malicious clients; a run that diverges counts as guessing."""
    return (result["clean"]["accuracy"] or 0.0) - (result["chance"] if row["accuracy"] is None else row["accuracy"])


def section(runs: Sequence[RunFolder]) -> list[Leak]:
    """Every run that was attacked. Raises UserError for a damaged picture."""
    return [_leak(run, run.attack) for run in runs if run.attack]


def _leak(run: RunFolder, attack: Attack) -> Leak:
    words = ", ".join(f"sample {row['sample']}: {decibels(row['psnr'])}" for row in attack["attacked"])
    seen = attack["observed_values"] / max(1, attack["values"])
    control = inversion_word(attack["control"]) if "control" in attack else ""
    return Leak(run.label, attack, seen, _picture(run), words, control)


def _picture(run: RunFolder) -> str | None:
    """The run's picture; None if it has none."""
    path = run.path / "attack.png"
    if not path.is_file():
        return None
    file = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            if path.stat().st_size > _FILE_BYTES:
                raise ValueError("it is too large")
            with Image.open(path, formats=["PNG"]) as image:
                image.convert("RGB").save(file, "PNG")
    except Exception as error:  # an untrusted file may fail a decoder in any way
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    return base64.b64encode(file.getvalue()).decode()
