"""Differential privacy, row 23 of the faults: what was measured, our figure, the goal; and what it costs.

    python benchmarks/hardening/privacy.py [--draws 1000000] [--inputs 10000] [--cost]

Needs dp-accounting (`pip install 'fewbytes[dp]'`). With --cost also accuracy, bytes and seconds of FedAvg on digits,
15,010 values, 20 rounds, without a promise and at epsilon 8 and 2: of 200 clients with seven samples each, and of the
samples of 5 clients.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import torch
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import kstest
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.core.privacy import ClientPrivacy, PrivateMean, SamplePrivacy, clipped, clipped_sum, random_bytes
from fewbytes.core.promise import Privacy
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.models import build_model

Measured = tuple[str, str, str]
"""What was measured, the figure, the goal."""
PROMISE = Privacy(8, 1e-5, 1.5)


def noise(draws: int = 1_000_000) -> list[Measured]:
    """The noise on a mean of ten clients who send nothing, in deviations that are counted."""
    central = ClientPrivacy(PROMISE, 20, 0)
    mean = PrivateMean(central, {"w": torch.zeros(draws)}, lambda: (10, random_bytes(b"a secret")))
    mean.add({"w": torch.zeros(draws)})
    drawn = mean()["w"].double().numpy() / (central.multiplier * PROMISE.clip / 10)
    return [
        (f"standard deviation of the noise, {draws:,} draws", f"{100 * (drawn.std() - 1):+.3f} %", "within 1 %"),
        ("Kolmogorov-Smirnov test of the same, p", f"{kstest(drawn, 'norm').pvalue:.3f}", "> 0.01"),
    ]


def clipping(inputs: int = 10_000) -> list[Measured]:
    """How much longer than the clip an update is, at most, of lengths 1e-6 to 1e30; and a sample's gradient."""
    generator = torch.Generator().manual_seed(0)
    longest = 0.0
    for _ in range(inputs):
        scale = 10 ** float(torch.empty(()).uniform_(-6, 30, generator=generator))
        change = {name: scale * torch.randn(n, generator=generator).double() for name, n in (("w", 50), ("b", 3))}
        longest = max(longest, _norm(clipped(change, PROMISE.clip)) / PROMISE.clip)
    model = nn.Linear(20, 4)
    x = torch.randn(inputs, 20, generator=generator) * 10 ** torch.empty(inputs, 1).uniform_(-3, 6, generator=generator)
    y = torch.randint(0, 4, (inputs,), generator=generator)
    steepest = 0.0
    for i in range(min(inputs, 1000)):
        parameters = dict(model.named_parameters())
        one = clipped_sum(model, parameters, nn.functional.cross_entropy, x[i : i + 1], y[i : i + 1], PROMISE.clip)
        steepest = max(steepest, _norm(one) / PROMISE.clip)
    return [
        (f"norm of a clipped update over the clip, {inputs:,} inputs, less 1", f"{longest - 1:.1e}", "<= 1e-6"),
        ("norm of a clipped sample's gradient over the clip, less 1", f"{steepest - 1:.1e}", "<= 1e-6"),
    ]


def _norm(change: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in change.values()))


def accounting() -> list[Measured]:
    """Our epsilon beside that of dp-accounting's privacy loss distributions, and calibration beside what was asked."""
    differ, over = 0.0, -math.inf
    for rounds in (1, 20, 200):
        central = ClientPrivacy(PROMISE, rounds, 0)
        accountant = PLDAccountant()
        accountant.compose(SelfComposedDpEvent(GaussianDpEvent(central.multiplier), rounds))
        differ = max(differ, abs(central.epsilon(rounds) - accountant.get_epsilon(PROMISE.delta)))
        over = max(over, central.epsilon(rounds) - PROMISE.epsilon)
        for samples in (15, 200, 3000):
            terms = SamplePrivacy(PROMISE, rounds, 2, 20)
            over = max(over, terms.epsilon(samples, rounds) - PROMISE.epsilon)
    return [
        ("epsilon less that of dp-accounting", f"{differ:.1e}", "<= 1e-6"),
        ("epsilon of all rounds less what was promised", f"{over:.1e}", "<= 0"),
    ]


class _Stopped(fb.FedAvg):
    """FedAvg stopped in round 2, when the noisy mean is there, as often as it is begun but for the last time."""

    def round(self, state: object, net: fb.Network, t: int) -> None:
        fb.FedAvg.round(self, state, net, t)  # type: ignore[arg-type]
        if t == 2 and STOPS:
            STOPS.pop()
            raise KeyboardInterrupt


STOPS: list[None] = []


def resuming(times: int = 5) -> list[Measured]:
    """What runs say they have spent that were stopped in a round, gone on with, and gone back in."""
    forgotten = 0
    for of in ("clients", "samples"):
        STOPS.extend([None] * times)
        with tempfile.TemporaryDirectory() as name:
            how = {"task": _digits(5), "rounds": 3, "workers": 1, "out": Path(name) / "run"}
            how |= {"dp": f"of={of},epsilon=8,delta=1e-5,clip=1", "keep_checkpoints": 3}
            resume = False
            while STOPS:
                try:
                    fb.run(_Stopped(epochs=1), resume=resume, **how)
                except KeyboardInterrupt:
                    resume = True
            spent = [row["privacy"]["epsilon"] for row in fb.run(_Stopped(epochs=1), resume=True, **how).rounds]
            forgotten += spent != sorted(spent) or len(spent) != 3 or abs(spent[-1] - 8) > 1e-4
            try:
                again = fb.run(_Stopped(epochs=1), resume=True, from_round=1, **how)
                forgotten += again.summary["epsilon_spent"] < spent[-1]
            except fb.UserError:  # nothing is left to be spent
                pass
    return [("runs stopped and gone back in that forgot what they had spent", f"{forgotten} of 2", "0")]


def _digits(clients: int) -> fb.Task:
    data = load_dataset("digits")
    dealt = federate(data, Partition("iid", clients=clients), seed=0)
    return fb.Task.on(dealt, lambda: build_model("mlp", data.train.shape, len(data.classes)), seed=0)


def cost(seeded: bool = True) -> list[Measured]:
    """Accuracy, bytes and seconds of FedAvg without a promise, and at epsilon 8 and 2. With `seeded` noise it is the
    same each time."""
    of = {
        "clients": (200, fb.FedAvg(epochs=2, lr=0.2, batch=5)),
        "samples": (5, fb.FedAvg(epochs=2, lr=0.5, batch=20)),
    }
    measured = []
    for protected, (clients, method) in of.items():
        for epsilon in (None, 8, 2):
            dp = f"of={protected},epsilon={epsilon},delta=1e-5,clip=1.0" + ",noise=seeded" * seeded
            how = {"rounds": 20, "evaluate_every": 20, "workers": 1, "save_models": False}
            result = fb.run(method, _digits(clients), dp=dp if epsilon else None, **how)
            told = result.summary
            figure = f"{100 * result.accuracy:.1f} %, {told['uplink_bytes_per_client_round']:,.0f} B up, "
            figure += f"{told['downlink_bytes_per_client_round']:,.0f} B down, {told['seconds']:.1f} s"
            asked = f"epsilon {epsilon}" if epsilon else "no promise"
            measured.append((f"fedavg, {protected}, {asked}", figure, "beside no promise"))
    return measured


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1_000_000)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--cost", action="store_true")
    o = parser.parse_args()
    parts = [lambda: noise(o.draws), lambda: clipping(o.inputs), accounting, resuming, *([cost] if o.cost else [])]
    for measure in parts:
        for what, figure, goal in measure():
            print(f"{what:70} {figure:>14}   goal {goal}", flush=True)


if __name__ == "__main__":
    main()
