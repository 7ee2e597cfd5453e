"""The same faults with Flower's own FedAvg and arrays, in the version that is installed."""

from __future__ import annotations

import hashlib
import logging
import random
import resource
import struct

import numpy as np
from figures import Figure
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

logging.getLogger("flwr").setLevel(logging.CRITICAL)
TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # what Flower's own processes set
HONEST = 4
ONES = np.ones(3, np.float32)


def reply(value: np.ndarray, samples: float = 10) -> Message:
    """A client's reply as Flower's FedAvg takes it."""
    content = RecordDict(
        {"arrays": ArrayRecord({"w": Array(value)}), "metrics": MetricRecord({"num-examples": samples})}
    )
    return Message(content, 1, "train")


def aggregated(replies: list[Message]) -> np.ndarray:
    """What FedAvg makes of replies."""
    arrays, _ = FedAvg().aggregate_train(1, replies)
    assert arrays is not None
    return arrays["w"].numpy()


def lies(_: int) -> list[Figure]:
    """Row 4: four clients send ones, one lies; what its lie makes of the model."""
    cases = {
        "NaN": (ONES * np.nan, 10),
        "infinite": (ONES * np.inf, 10),
        "times a million": (ONES * 1e6, 10),
        "1e300 samples": (ONES * 7, 1e300),
        "-39 samples": (ONES * 7, -39),
        "NaN samples": (ONES * 7, float("nan")),
        "0 samples, as the others say": (ONES * 7, 0),
        "8 values instead of 3": (np.ones(8, np.float32), 10),
        "one value instead of 3": (ONES[:1] * 7, 10),
    }
    found = []
    for what, (value, samples) in cases.items():
        honest = [reply(ONES, 0 if samples == 0 else 10) for _ in range(HONEST)]
        try:
            with np.errstate(all="ignore"):
                model = aggregated([*honest, reply(value, samples)])
            figure, met = f"the model is {model.astype(float).tolist()}", bool(np.array_equal(model, ONES))
        except Exception as error:
            figure, met = f"the round dies: {type(error).__name__}: {error}"[:100], False
        found.append(Figure(what, figure, "the model without that client, [1, 1, 1]", met))
    return found


def damaged(_: int) -> list[Figure]:
    """Row 2: an array of about 2 kB cut off at every byte and with every bit flipped; its objects' digests, which
    Flower's transport looks at, are not part of it."""
    whole = np.random.default_rng(0).normal(size=480).astype(np.float32)
    data = Array(whole).data
    damaged = [data[:length] for length in range(len(data))]
    for i, byte in enumerate(data):
        damaged += [data[:i] + bytes([byte ^ 1 << bit]) + data[i + 1 :] for bit in range(8)]
    refused = 0
    for each in damaged:
        try:
            Array("float32", (480,), "numpy.ndarray", each).numpy()
        except Exception:
            refused += 1
    figure = f"{refused:,} of {len(damaged):,} refused"
    return [
        Figure(
            f"an array of {len(data):,} bytes, without the transport's digests", figure, "all", refused == len(damaged)
        )
    ]


def bombed(_: int) -> list[Figure]:
    """Row 3: an array of a hundred bytes that says it has 2^33 values, with 8 GiB to spare."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (8589934592,), }".ljust(117) + b"\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header
    try:
        Array("float32", (3,), "numpy.ndarray", data).numpy()
        figure = "taken"
    except MemoryError as error:
        figure = f"it asks for the memory: {error}"
    except Exception as error:
        figure = f"refused: {type(error).__name__}"
    what = f"an array of {len(data)} bytes that says it has 2^33 values"
    return [Figure(what, figure, "refused before memory is asked for", figure.startswith("refused"))]


def orders(count: int) -> list[Figure]:
    """Row 24: the same replies in so many drawn orders."""
    rng = np.random.default_rng(0)
    replies = [reply(rng.normal(size=1000).astype(np.float32), samples=7 + i) for i in range(10)]
    shuffle = random.Random(0)
    digests = {hashlib.sha256(aggregated(shuffle.sample(replies, 10)).tobytes()).digest() for _ in range(count)}
    return [
        Figure(f"models of the same replies in {count} orders", f"{len(digests)} different", "1", len(digests) == 1)
    ]
