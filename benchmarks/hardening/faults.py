"""The faults and attacks that a server left alone must bear, and which functions here measure them."""

from __future__ import annotations

from typing import NamedTuple


class Measure(NamedTuple):
    """A function of a module here, `module.function`, that returns figures; it is called with a count, of what its
    docstring says: `usual`, or `long` where FEWBYTES_LONG is set. `limit`: seconds it may take; long, 20 times
    that."""

    name: str
    usual: int
    long: int
    limit: float = 180.0


class Fault(NamedTuple):
    """`stock`: what the same comes to with Flower's own FedAvg. `lacking`: what is not measured of it, and why."""

    number: int
    name: str
    measures: tuple[Measure, ...] = ()
    stock: tuple[Measure, ...] = ()
    lacking: str = ""


FAULTS = (
    Fault(1, "malformed frames", (Measure("wire.fuzzed", 1000, 20_000),)),
    Fault(2, "frames cut off, bits flipped", (Measure("wire.damaged", 1, 1),), (Measure("stock.damaged", 1, 1),)),
    Fault(3, "bombs", (Measure("wire.bombed", 1, 1),), (Measure("stock.bombed", 1, 1),)),
    Fault(
        4,
        "well-formed false replies",
        (Measure("replies.lies", 126, 2000, 400), Measure("costs.admission", 9, 99)),
        (Measure("stock.lies", 1, 1),),
    ),
    Fault(5, "a client killed while it uploads", (Measure("connections.killed_uploads", 100, 1000, 400),)),
    Fault(
        6,
        "duplicate replies",
        (Measure("replies.duplicates", 1000, 10_000),),
        lacking="eight threads at once, which the SuperLink handles",
    ),
    Fault(7, "late replies", (Measure("replies.late", 60, 600),)),
    Fault(8, "replayed replies", (Measure("deployment.replays", 100, 1000),)),
    Fault(
        9,
        "strangers, and names or files left for them",
        (
            Measure("deployment.unauthenticated", 10, 50),
            Measure("connections.impostors", 10, 50),
            Measure("deployment.names", 1, 1),
            Measure("deployment.kept", 1, 1),
        ),
        lacking="revoked certificates: there are no revocation lists, only a new authority for every node",
    ),
    Fault(
        10,
        "the server, or any process, crashes",
        (
            Measure("durability.kills", 8, 200),
            Measure("deployed.killed", 6, 200, 600),
            Measure("durability.power_loss", 6, 60),
            Measure("deployed.power_loss", 3, 20, 400),
        ),
    ),
    Fault(
        11,
        "the disk is full",
        (Measure("durability.full_disk", 6, 50), Measure("deployed.full_disk", 3, 14, 600)),
        lacking="input and output errors",
    ),
    Fault(12, "the clock jumps", (Measure("deployment.clock", 1, 1),)),
    Fault(13, "stragglers", (Measure("replies.stragglers", 10, 50),)),
    Fault(14, "dropouts", (Measure("replies.dropouts", 100, 1000),)),
    Fault(15, "too few answer", (Measure("replies.quorum", 2, 4),)),
    Fault(
        16,
        "clients that come and go, unstable links",
        (
            Measure("connections.comers", 100, 1000),
            Measure("connections.flaps", 4, 40, 400),
            Measure("connections.reconnections", 100, 100),
        ),
    ),
    Fault(
        17,
        "slow and idle connections",
        (Measure("connections.crowded", 200, 800, 400), Measure("connections.idle", 60, 600, 240)),
    ),
    Fault(
        18,
        "weeks of work",
        (
            Measure("replies.soak", 1000, 1000, 400),
            Measure("replies.soak_flower", 100, 1000, 400),
            Measure("connections.soak", 200, 2000, 400),
        ),
    ),
    Fault(
        19,
        "poisoned updates",
        (Measure("learning.poisoned", 15, 50, 300), Measure("malicious.measured", 20, 40, 900)),
        lacking="malicious clients that know the rule",
    ),
    Fault(
        20,
        "backdoors by model replacement",
        (Measure("learning.backdoored", 15, 50),),
        lacking="backdoors that hide in a normal-looking update",
    ),
    Fault(21, "gradient inversion", (Measure("learning.inverted", 2, 8),), lacking="attacks that unroll training"),
    Fault(22, "membership inference", (Measure("learning.inferred", 8, 64),)),
    Fault(
        23,
        "differential privacy",
        (Measure("privacy.promised", 10_000, 100_000),),
        lacking="crash and resume, which tests/running/test_dp.py tests",
    ),
    Fault(
        24,
        "order of arrival, number of workers",
        (Measure("replies.orders", 5, 20),),
        (Measure("stock.orders", 20, 20),),
    ),
    Fault(25, "bytes", (Measure("sent.frames", 5, 20), Measure("sent.sockets", 3, 10))),
    Fault(
        26,
        "a server that submits code, or names files",
        (Measure("nodes.bundles", 1, 1), Measure("nodes.settings", 1, 1)),
    ),
    Fault(
        27,
        "a server that tries to separate one client from a sum",
        (Measure("nodes.singled_out", 1, 1), Measure("learning.imprinted", 1, 1)),
        lacking="the server's own keys in place of neighbours', which nobody authenticates",
    ),
    Fault(28, "a server that looks for one sample, or repeats its requests", (Measure("nodes.oracle", 5, 50),)),
    Fault(29, "another account on the host", (Measure("nodes.planted", 1, 1),)),
    Fault(30, "outlying clients", (Measure("watch.named", 20, 60, 400), Measure("watch.costs", 5, 15, 300))),
    Fault(
        31,
        "damaged files of a run",
        (Measure("damage.flipped", 100, 2000), Measure("damage.diary", 200, 2000)),
    ),
)
COSTS = (
    Measure("costs.rounds", 3, 11, 300),
    Measure("costs.privacy", 1, 1, 300),
    Measure("secure.rounds", 2, 5, 300),
    Measure("secure.summed", 5, 100),
)
"""What guarding a run costs, which has no goal."""
