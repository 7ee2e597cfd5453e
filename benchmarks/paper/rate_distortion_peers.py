"""NNCodec and SZ on tensors of an .npz file, by their public interfaces: what `rate_distortion.py` calls.

    PYTHON benchmarks/paper/rate_distortion_peers.py TENSORS.npz POINTS.json

PYTHON has `pip install nncodec pysz`; nncodec (NNC, ISO/IEC 15938-17) needs numpy below 2. What is not installed there
is left out. Steps are multiples of the root mean square of all values, so that any scale of the tensors is swept alike.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = Mapping[str, NDArray[np.float32]]
REPEATS = 3
HALF_OCTAVES = range(-4, 6)  # of NNCodec's steps, from the root mean square
BOUNDS = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8)  # of SZ's errors, in root mean squares
SHARES = (0.01, 0.03, 0.1, 0.2, 0.3)  # of SZ's errors, of each tensor's range


@dataclass(frozen=True)
class Point:
    """What a coder does at one setting: bits a value, squared error over squared norm, MB of float32 a second."""

    coder: str
    setting: str
    bits: float
    nmse: float
    encode: float
    decode: float


def point(coder: str, setting: str, tensors: Tensors, size: int, decoded: Mapping[str, Any], *took: float) -> Point:
    """Of `size` bytes, what they decode to, and the seconds that encoding and decoding took."""
    values = sum(value.size for value in tensors.values())
    error = norm = 0.0
    for name, value in tensors.items():
        exact = value.astype(np.float64)
        error += float(((exact - np.asarray(decoded[name], np.float64).reshape(value.shape)) ** 2).sum())
        norm += float((exact**2).sum())
    encode, decode = (4e-6 * values / seconds for seconds in took)
    return Point(coder, setting, 8 * size / values, error / norm, encode, decode)


def fastest(function: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and the least seconds it took of `REPEATS` times."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - began)
    return result, min(times)


def root_mean_square(values: NDArray[np.float32]) -> float:
    return math.sqrt(float((values.astype(np.float64) ** 2).mean()))


def nncodec(tensors: Tensors) -> Iterator[Point]:
    """Dependent quantisation as it is by default; then vectors by the step of the rest; steps by layers' sizes, too;
    and plain quantisation. A quantisation parameter of 4 more doubles the step, which is 1 at 0."""
    from nncodec.nn import decode, encode

    middle = round(4 * math.log2(root_mean_square(np.concatenate([v.reshape(-1) for v in tensors.values()]))))
    for coder, args, alike in (
        ("NNCodec", {}, False),
        ("NNCodec, vectors alike", {}, True),
        ("NNCodec, opt_qp", {"opt_qp": True}, True),
        ("NNCodec, no use_dq", {"use_dq": False}, True),
    ):
        for half in HALF_OCTAVES:
            qp = middle + 2 * half - (4 if "opt_qp" in args else 0)
            given = {**args, "qp": qp, **({"nonweight_qp": qp} if alike else {})}

            def encoded(given: dict[str, Any] = given) -> bytes:
                model = {str(i): value.copy() for i, value in enumerate(tensors.values())}  # its bitstreams hold names
                return encode(model, args=given)

            coded, encoding = fastest(encoded)
            decoded, decoding = fastest(lambda coded=coded: decode(coded))
            named = {name: decoded[str(i)] for i, name in enumerate(tensors)}
            yield point(coder, f"qp {qp}", tensors, len(coded), named, encoding, decoding)


def sz(tensors: Tensors) -> Iterator[Point]:
    """As FedSZ has it, each tensor by an error bound relative to its range; and all values as one vector, by one bound
    and without prediction."""
    from pysz import sz, szAlgorithm, szConfig, szErrorBoundMode

    def coded(parts: Tensors, config: Any) -> tuple[int, Mapping[str, Any], float, float]:
        found, encoding = fastest(lambda: {name: sz.compress(part, config)[0] for name, part in parts.items()})
        back, decoding = fastest(
            lambda: {name: sz.decompress(found[name], np.float32, part.shape)[0] for name, part in parts.items()}
        )
        return sum(part.size for part in found.values()), back, encoding, decoding

    flat = {name: value.reshape(-1) for name, value in tensors.items()}
    for share in SHARES:
        config = szConfig()
        config.errorBoundMode, config.relErrorBound = szErrorBoundMode.REL, share
        config.cmprAlgo = szAlgorithm.LORENZO_REG
        size, decoded, *took = coded(flat, config)
        yield point("SZ, as FedSZ", f"{share:g} of ranges", tensors, size, decoded, *took)
    whole = np.concatenate(list(flat.values()))
    ends = np.cumsum([value.size for value in flat.values()])[:-1]
    for bound in BOUNDS:
        config = szConfig()
        config.errorBoundMode, config.absErrorBound = szErrorBoundMode.ABS, bound * root_mean_square(whole)
        config.cmprAlgo = szAlgorithm.NOPRED
        size, one, *took = coded({"": whole}, config)
        decoded = dict(zip(flat, np.split(one[""], ends), strict=True))
        yield point("SZ, one bound", f"{bound:g} rms", tensors, size, decoded, *took)


def main(source: str, target: str) -> None:
    with np.load(source, allow_pickle=False) as kept:
        tensors = {name: kept[name] for name in kept.files}
    points, missing = [], []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr), contextlib.chdir(folder):
        for coder in (nncodec, sz):
            try:
                points += coder(tensors)
            except ModuleNotFoundError as error:
                missing.append(f"{coder.__name__}: {error}")
    with open(target, "w") as file:
        json.dump({"points": [asdict(each) for each in points], "missing": missing}, file)


if __name__ == "__main__":
    with contextlib.suppress(ModuleNotFoundError):  # one thread, as all other coders
        import torch

        torch.set_num_threads(1)
    main(*map(os.path.abspath, sys.argv[1:3]))
