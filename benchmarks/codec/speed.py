"""Speed, size and error of the codec on a CNN's update, beside other ways to make bytes of it, as a Markdown table.

    python benchmarks/codec/speed.py [--mb 1 50] [--repeats 15] [--only TEXT]

NVFlare's quantisers and OpenFL's EDEN are measured where they are installed. Each needs an environment of its own, with
`nvflare bitsandbytes` or `openfl torch` beside this package; `--only NVFlare` leaves out the other rows.

The update is what a client's training changes: a CNN is trained on the digits of the package, then for ten more steps
on five of the ten classes (SGD, learning rate 0.02, momentum 0.9, batches of 32). All ways encode that difference of
float32 parameters; "with its base" encodes the client's model, whose receiver has the model before. MB/s are MB of
float32 values per second of one thread's processor time, the best of the repeats, which take turns. Error: the squared
norm of what was lost over that of the difference.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
import zstandard
from safetensors.torch import load, save
from torch import Tensor, nn

from fewbytes.codec import decode, encode
from fewbytes.data import load_dataset

State = dict[str, Tensor]
Way = tuple[Callable[[State], bytes], Callable[[bytes], State]]


def cnn(width: int) -> nn.Module:
    """Four convolutions with batch norm and a classifier for 8x8 grey images: about 378 width^2 values."""
    sizes, layers = [1, width, 2 * width, 4 * width, 8 * width], []
    for i in range(4):
        layers += [nn.Conv2d(sizes[i], sizes[i + 1], 3, padding=1), nn.BatchNorm2d(sizes[i + 1]), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if i else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(sizes[-1], 10))


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(steps):
        batch = torch.randint(len(x), (32,))
        optimiser.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimiser.step()


def parameters(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def update(megabytes: float) -> tuple[State, State]:
    """The parameters of a model of about this size, before and after a client has trained it."""
    torch.manual_seed(0)
    model = cnn(round((megabytes * 1e6 / 4 / 378) ** 0.5))
    x, y = load_dataset("digits").train.load()
    train(model, x, y, 30)
    before = parameters(model)
    train(model, x[y < 5], y[y < 5], 10)
    return before, parameters(model)


def torch_save(state: State) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def ways(before: State, after: State) -> dict[str, Way]:
    """What is compared, by name: a difference to bytes, and back. A new row is an entry here."""
    found: dict[str, Way] = {
        "`torch.save`": (torch_save, lambda data: torch.load(io.BytesIO(data), weights_only=True)),
        "zstandard": (lambda state: zstandard.compress(save(state)), lambda data: load(zstandard.decompress(data))),
        "fewbytes, lossless": (encode, decode),
        "fewbytes, lossless, with its base": (lambda _: encode(after, before), lambda data: decode(data, before)),
    }
    for bits in (2.0, 1.0, 0.5):
        found[f"fewbytes, {bits:g} bit{'s' * (bits > 1)}"] = (lambda state, bits=bits: encode(state, bits=bits), decode)
    if importlib.util.find_spec("nvflare"):
        found |= {f"NVFlare {name}": nvflare_way(name) for name in ("blockwise8", "normfloat4")}
    if importlib.util.find_spec("openfl"):
        found |= {f"OpenFL EDEN, {bits} bit{'s' * (bits > 1)}": openfl_way(bits) for bits in (4, 2, 1)}
    return found


def nvflare_way(name: str) -> Way:
    """A quantiser of NVFlare, and its serialiser of messages."""
    sys.path.append(str(Path(__file__).parents[1] / "nvflare"))
    import on_cpu  # noqa: F401
    from nvflare.apis.dxo import DXO, DataKind, from_shareable
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.app_opt.pt.decomposers import TensorDecomposer
    from nvflare.app_opt.pt.quantization.dequantizer import ModelDequantizer
    from nvflare.app_opt.pt.quantization.quantizer import ModelQuantizer
    from nvflare.fuel.utils import fobs

    fobs.register(TensorDecomposer)
    quantiser, dequantiser, context = ModelQuantizer(name), ModelDequantizer(), FLContext()

    def there(state: State) -> bytes:
        dxo = DXO(DataKind.WEIGHT_DIFF, dict(state))
        return fobs.dumps(quantiser.process_dxo(dxo, Shareable(), context).to_shareable())

    def back(data: bytes) -> State:
        return dequantiser.process_dxo(from_shareable(fobs.loads(data)), Shareable(), context).data

    return there, back


def openfl_way(bits: int) -> Way:
    """OpenFL's EDEN pipeline, and its messages."""
    from openfl.pipelines import EdenPipeline
    from openfl.protocols import base_pb2
    from openfl.protocols.utils import construct_model_proto, deconstruct_model_proto

    with contextlib.redirect_stdout(sys.stderr):
        pipeline = EdenPipeline(n_bits=bits)

    def there(state: State) -> bytes:
        arrays = {name: value.numpy() for name, value in state.items()}
        return construct_model_proto(arrays, 0, pipeline).SerializeToString()

    def back(data: bytes) -> State:
        arrays, _ = deconstruct_model_proto(base_pb2.ModelProto.FromString(data), pipeline)
        return {name: torch.from_numpy(value) for name, value in arrays.items()}

    return there, back


def timed(function: Callable[[], object]) -> float:
    """Seconds of the processor: other programs on the machine do not count."""
    started = time.process_time()
    function()
    return time.process_time() - started


def squares(values: Iterable[Tensor]) -> float:
    return sum(float(value.double().square().sum()) for value in values)


def rows(megabytes: float, repeats: int, only: str) -> Iterator[str]:
    before, after = update(megabytes)
    state = {name: value - before[name] for name, value in after.items()}
    raw = sum(value.nbytes for value in state.values())
    compared = {name: way for name, way in ways(before, after).items() if only in name}
    encoded = {name: there(state) for name, (there, _) in compared.items()}
    best = {name: [float("inf"), float("inf")] for name in compared}
    for _ in range(repeats):
        for name, (there, back) in compared.items():
            times = timed(lambda f=there: f(state)), timed(lambda f=back, data=encoded[name]: f(data))
            best[name] = [min(pair) for pair in zip(best[name], times, strict=True)]
    yield f"| {raw / 1e6:.1f} MB | encode, MB/s | decode, MB/s | times fewer bytes than float32 | error |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, (_, back) in compared.items():
        received = back(encoded[name])
        wanted = after if "its base" in name else state
        error = squares(received[each] - value for each, value in wanted.items()) / squares(state.values())
        speed = " | ".join(f"{raw / seconds / 1e6:.0f}" for seconds in best[name])
        yield f"| {name} | {speed} | {raw / len(encoded[name]):.2f} | {error:.2g} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, nargs="+", default=[1, 50])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="Rows whose names contain this text.")
    o = parser.parse_args()
    torch.set_num_threads(1)
    for megabytes in o.mb:
        print("\n".join(rows(megabytes, o.repeats, o.only)), flush=True)
        print()
