"""NNCodec behind a pipe, by its public interface: what `equal_accuracy.py` starts with the Python that has it.

A request is a line of JSON, and what it says follows: `{"encode": [[3, 4], …], "qp": -30}` and float32 tensors of these
shapes, `{"decode": 512, "count": 2}` and a bitstream of so many bytes. The answer is its length as 8 bytes, and a
bitstream or float32 tensors. What else is printed goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import sys
import tempfile
from typing import Any

import numpy as np


def encoded(shapes: list[list[int]], qp: int, data: bytes) -> bytes:
    """A bitstream; vectors are quantised by the step of the rest, and tensors are called by their numbers."""
    from nncodec.nn import encode

    parts = np.split(np.frombuffer(data, np.float32), np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    model = {str(i): part.reshape(shape).copy() for i, (part, shape) in enumerate(zip(parts, shapes, strict=True))}
    return bytes(encode(model, args={"qp": qp, "nonweight_qp": qp}))


def decoded(data: bytes, count: int) -> bytes:
    """The tensors' values, one after another."""
    from nncodec.nn import decode

    tensors: dict[str, Any] = decode(bytearray(data))
    return b"".join(np.asarray(tensors[str(i)], np.float32).tobytes() for i in range(count))


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while line := sys.stdin.buffer.readline():
        match json.loads(line):
            case {"encode": shapes, "qp": qp}:
                answer = encoded(shapes, qp, sys.stdin.buffer.read(4 * sum(math.prod(shape) for shape in shapes)))
            case {"decode": length, "count": count}:
                answer = decoded(sys.stdin.buffer.read(length), count)
        answers.write(struct.pack("<q", len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # where it may leave files
        main()
