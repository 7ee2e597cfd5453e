"""Rate and distortion of lossy coders on one client's update: ours, the library's own compressors, SZ, NNCodec.

    FEWBYTES_DATA=… python benchmarks/paper/rate_distortion.py [--peers-python PATH] [--sources resnet8 adapter]

Two updates (a client's trained parameters less those it was sent), made here by FedAvg: of ResNet-8 on CIFAR-10 (20
clients, Dirichlet 0.5, two epochs of 300 images, SGD) in round 10, and of a LoRA adapter of rank 8 on a small GPT-2
(`examples/05_adapters`, which needs peft and transformers; Adam) in round 3. For each coder and setting: bits a value,
all that is encoded counted; NMSE, the squared error over the squared norm, of all tensors together; MB of float32 a
second, one thread, the best of three. Then, for three rates of ours, the bits that others take at the same NMSE
(between two settings log NMSE is a line in bits) and how many times ours that is.

PATH is a Python of its own for the peers, with `pip install nncodec pysz` (nncodec needs numpy below 2); without it
they are looked for here. NNCodec's licence grants no patents: it is measured, from outside, and nothing of it is used.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from rate_distortion_peers import Point, fastest, point
from torch import Tensor

import fewbytes as fb
from fewbytes.base.rate import Rate
from fewbytes.base.state import State, trained_parameters
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.methods.parts.averaging import GlobalModel, Model
from fewbytes.models.build import ModelBuilder
from fewbytes.wire import Layout, Lossy
from fewbytes.wire.topk import largest

HERE = Path(__file__).resolve().parent
RATES = (0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 3.0, 4.0)  # bits a value, of ours
COMPARED = (0.3, 0.8, 2.0)
PARTS = (1 / 128, 1 / 32, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of values that top-k sends


@fb.payload
class Update:
    change: fb.Dense


@fb.payload
class Chosen:
    change: fb.TopK


@fb.payload
class Rounded:
    change: fb.Quantised


@fb.payload
class Signed:
    change: fb.Signs


class Recorded(fb.FedAvg):
    """FedAvg, a quarter of the clients a round; keeps what it sent last and what was answered last."""

    sent: ClassVar[State] = {}
    answered: ClassVar[State] = {}

    def round(self, state: GlobalModel, net: fb.Network, t: int) -> None:
        Recorded.sent, mean = state.theta, net.mean(state.theta)
        for _, reply in net.call(self.train, to=net.sample(0.25), send=Model(fb.Dense(state.theta))):
            Recorded.answered = reply.theta.dense()
            mean.add(Recorded.answered, weight=reply.samples)
        state.theta = mean()


def update(task: fb.Task, rounds: int, **terms: Any) -> State:
    """How the parameters changed at the last client of the last round."""
    fb.run(Recorded(**terms), task, rounds=rounds, save_models=False)
    names = trained_parameters(task.problem.first_model())
    return {name: Recorded.answered[name] - Recorded.sent[name] for name in names}


def resnet8() -> State:
    cifar = load_dataset("cifar10")
    data = federate(cifar, Partition("dirichlet", 20, alpha=0.5, samples=(300, 10)), seed=1)
    task = fb.Task.on(data, ModelBuilder("resnet8", cifar.train.shape, len(cifar.classes)), seed=1)
    return update(task, 10, epochs=2, lr=0.05, batch=50, momentum=0.9)


def adapter() -> State:
    with tempfile.TemporaryDirectory() as folder:
        prepare = HERE.parents[1] / "examples" / "05_adapters" / "prepare.py"
        subprocess.run(
            [sys.executable, prepare, "--out", folder, "--steps", "60"],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        terms = {"epochs": 1, "optimiser": "adam", "lr": 0.003, "batch": 16}
        experiment = make_experiment({
            "method": "fedavg", "dataset": f"{folder}/texts", "model": f"hf:{folder}/backbone", "lora": "rank=8",
            "length": 128, "partition": "pathological", "clients": 6, "classes_per_client": 1, "parameters": terms,
        })  # fmt: skip
        return update(find(experiment).task, 3, **terms)


SOURCES: dict[str, Callable[[], State]] = {"resnet8": resnet8, "adapter": adapter}


def ours(tensors: dict[str, Tensor], bits: float) -> tuple[int, dict[str, Tensor], float, float]:
    """Bytes of what is encoded for so many bits a value, what it decodes to, seconds of encoding and of decoding."""
    layout = Layout.of(tensors)
    update = Update(fb.Dense(tensors))
    frame, encoding = fastest(lambda: bytes(fb.pack(update, layout=layout, lossy=Lossy(Rate(bits)))))
    decoded, decoding = fastest(lambda: fb.unpack(Update, frame, layout=layout).change.dense())
    return len(frame), decoded, encoding, decoding


def packed(made: Callable[[], Any], layout: Layout) -> tuple[int, State, float, float]:
    """Likewise of a payload's frame; making the payload counts as encoding."""
    frame, encoding = fastest(lambda: bytes(fb.pack(made(), layout=layout)))
    kind = type(made())
    decoded, decoding = fastest(lambda: fb.unpack(kind, frame, layout=layout).change.dense())
    return len(frame), decoded, encoding, decoding


def own_points(tensors: State) -> Iterator[Point]:
    """Of what the library has."""
    layout, arrays = Layout.of(tensors), {name: value.numpy() for name, value in tensors.items()}

    def at(coder: str, setting: str, found: tuple[int, Mapping[str, Tensor], float, float]) -> Point:
        size, decoded, *took = found
        return point(coder, setting, arrays, size, {name: value.numpy() for name, value in decoded.items()}, *took)

    for bits in RATES:
        yield at("ours", f"{bits} bits", ours(tensors, bits))
    for part in PARTS:

        def chosen(part: float = part) -> Chosen:
            places = {name: largest(value, math.ceil(part * value.numel())) for name, value in tensors.items()}
            return Chosen(fb.TopK.of(tensors, places))

        yield at("top-k", f"{part:.3g} of values", packed(chosen, layout))
    yield at("FedCOM", "8 bits", packed(lambda: Rounded(fb.Quantised.of(tensors, 8)), layout))
    yield at("signs", "", packed(lambda: Signed(fb.Signs.of(tensors)), layout))


def peer_points(tensors: State, python: Path) -> list[Point]:
    """Of NNCodec and SZ, where that Python has them; says which it has not."""
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "tensors.npz", Path(folder) / "points.json"
        np.savez(given, **{name: value.numpy() for name, value in tensors.items()})
        done = subprocess.run([python, HERE / "rate_distortion_peers.py", given, made], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{python} failed:\n{done.stderr}")
        found = json.loads(made.read_text())
    for line in found["missing"]:
        print(f"left out: {line} (--peers-python names a Python that has it)")
    return [Point(**each) for each in found["points"]]


def bits_at(points: Sequence[Point], nmse: float) -> float:
    """Where a coder's curve has that NMSE; not a number where it was not measured."""
    curve = sorted(points, key=lambda each: each.nmse)
    logarithms = [math.log(each.nmse) for each in curve]
    bits = [each.bits for each in curve]
    return float(np.interp(math.log(nmse), logarithms, bits, left=math.nan, right=math.nan))


def compared(points: Sequence[Point]) -> None:
    curves: dict[str, list[Point]] = {}
    for each in points:
        curves.setdefault(each.coder, []).append(each)
    ours = curves.pop("ours")
    for rate in COMPARED:
        mine = min(ours, key=lambda each: abs(each.bits - rate))
        print(f"\nat ours of {mine.bits:.3f} bits (NMSE {mine.nmse:.4f})")
        for coder, curve in curves.items():
            if len(curve) > 1:
                bits = bits_at(curve, mine.nmse)
                said = "not reached" if math.isnan(bits) else f"{bits:.3f} bits, {bits / mine.bits:.3f} times ours"
                print(f"  {coder:24} {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--sources", nargs="+", choices=SOURCES, default=list(SOURCES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for source in args.sources:
        tensors = SOURCES[source]()
        values = sum(value.numel() for value in tensors.values())
        print(f"\n{source}: {values:,} values in {len(tensors)} tensors")
        print(f"{'coder':24} {'setting':16} {'bits':>8} {'NMSE':>9} {'encode MB/s':>12} {'decode MB/s':>12}")
        points = [*own_points(tensors), *peer_points(tensors, args.peers_python)]
        for each in points:
            print(
                f"{each.coder:24} {each.setting:16} {each.bits:8.3f} {each.nmse:9.5f} {each.encode:12.0f} "
                f"{each.decode:12.0f}", flush=True,
            )  # fmt: skip
        compared(points)


if __name__ == "__main__":
    main()
