"""What poisoned updates do to a model, with and without rules that bear them; what uploads tell of images."""

from __future__ import annotations

import math
import sys
import tempfile
import warnings
from pathlib import Path

from figures import Figure

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "methods"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "analysis"))

import torch
from test_attack import made
from test_poisoned import LIARS, accuracy

from fewbytes.analysis.attack import attack
from fewbytes.analysis.settings import Attacking
from fewbytes.core.rules import EVERY_RULE

warnings.simplefilter("ignore")
torch.set_num_threads(1)
NOISE = 1e-3  # variance


def poisoned(_: int) -> list[Figure]:
    """Row 19: digits, ten clients, two of which send their update times 100 or -100."""
    clean, found = accuracy(1.0, "mean"), []
    for factor in (100.0, -100.0):
        try:
            control = accuracy(factor, "mean")
        except Exception:
            control = math.nan
        figure = "diverges" if math.isnan(control) else f"{control:.1%} ({clean:.1%} without liars)"
        what = f"the mean, two of ten clients send {factor:g} times their update: the control"
        found.append(Figure(what, figure, "20 points below clean", not control > clean - 0.2))
        for rule in sorted(EVERY_RULE):
            named = f"{rule}={len(LIARS)}" if "krum" in rule else rule
            reached = accuracy(factor, named)
            met = reached > clean - 0.03
            found.append(Figure(f"{named}, {factor:g} times", f"{reached:.1%}", "within 3 points of clean", met))
    return found


def inverted(images: int) -> list[Figure]:
    """Row 21: so many digits, reconstructed from what methods upload of a LeNet."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        for method, noise in (("fedavg", 0.0), ("fedavg", NOISE), ("fedper", 0.0), ("genefl", 0.0)):
            run = Path(name) / method
            if not run.exists():
                made(run, method)
            result = attack(run, "lenet", how=Attacking(images=images, iterations=60, restarts=1, noise=noise))
            mean = result["psnr_mean"]
            figure = "exact" if mean is None else f"{mean:.1f} dB"
            if noise:
                goal, met = "at most 10 dB", mean is not None and mean <= 10
            elif method == "fedavg":
                goal, met = "at least 25 dB, or the test is void", mean is None or mean >= 25
            else:
                goal, met = "", None
            what = f"{method}, {result['observed_values']:,} of {result['values']:,} values seen"
            found.append(Figure(what + (f", with noise of variance {noise:g}" if noise else ""), figure, goal, met))
    return found
