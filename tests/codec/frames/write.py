"""Writes the golden messages of the codec, in a folder for each format of frames. Existing files stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from fewbytes.codec import Decoder, Encoder, Stream, decode
from fewbytes.wire.frame import FORMAT

HERE = Path(__file__).parent / str(FORMAT)


def main() -> None:
    """Write what is not there yet."""
    HERE.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(5)
    base = {
        "layer.weight": torch.randn(8, 6, generator=generator),
        "norm.running_var": torch.rand(6, generator=generator),
        "norm.num_batches_tracked": torch.tensor(7),
        "half": torch.randn(5, generator=generator).half(),
        "brain": torch.randn(5, generator=generator).bfloat16(),
        "flags": torch.tensor([True, False]),
    }
    state = {name: value + 1 if value.dtype != torch.bool else ~value for name, value in base.items()}
    arrays = {"a": np.linspace(0, 1, 12).reshape(3, 4), "b": np.arange(4, dtype=np.int16)}
    cases = {
        "tensors.frame": (base, None, None), "difference.frame": (state, "tensors.frame", None),
        "rounded.frame": (state, None, 2.0), "rounded-difference.frame": (state, "tensors.frame", 1.0),
        "arrays.frame": (arrays, None, None), "numbered.frame": ([*arrays.values()], None, None),
    }  # fmt: skip
    index = {}
    for name, (value, against, bits) in cases.items():
        held = decode((HERE / against).read_bytes()) if against else None
        if not (HERE / name).exists():
            (HERE / name).write_bytes(Encoder(bits).encode(value, held))
        got = decode((HERE / name).read_bytes(), held)
        named = got if isinstance(got, dict) else {str(i): each for i, each in enumerate(got)}
        index[name] = {
            "base": against,
            "layout": {key: [str(each.dtype).removeprefix("torch."), list(each.shape)] for key, each in named.items()},
            "sums": [float(each.reshape(-1).sum()) for each in named.values()],
        }
    stream = Stream(1)
    for name, value in (("stream-whole.frame", base), ("stream-difference.frame", state)):
        stream.advance(value)
        if not (HERE / name).exists():
            (HERE / name).write_bytes(stream.message("a"))
        stream.received("a", stream.version)
    stream, late, weights = Stream(1), Decoder(), torch.randn(200, generator=generator)
    for version in (1, 2, 3):
        stream.advance({"w": weights + 0.01 * version * torch.randn(200, generator=generator)})
        if version == 1:  # the others do not arrive
            late.decode(stream.message("late"))
            stream.received("late", 1)
    for name, end in (("sender.state", stream), ("late.state", late)):
        if not (HERE / name).exists():
            (HERE / name).write_bytes(end.state())
    (HERE / "index.json").write_text(json.dumps(index, indent=1) + "\n")


if __name__ == "__main__":
    main()
