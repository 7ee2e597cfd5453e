"""Settings of how a dataset is partitioned among clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, Self

from fewbytes.base.errors import UserError, suggestion
from fewbytes.base.ranges import Count, Positive, Share, UpToOne, Whole
from fewbytes.base.settings import Group, Text, reads_text, setting, whole_numbers
from fewbytes.base.units import plain

PARTITIONS = ("balanced", "dirichlet", "iid", "main-category", "pathological", "quantity", "shards")
"""The partitions `federate` knows by name, besides `column:<name>`, `folders` and `flwr:<Name>`."""
COLUMN = "column:"
FOLDERS = ""
"""The column of folders' names, of images in folders of domains or groups."""
USED_BY = {
    "alpha": ("dirichlet", "quantity", "flwr:<Partitioner>"),
    "classes_per_client": ("pathological",),
    "shards_per_client": ("shards",),
    "main_share": ("main-category",),
    "shots": ("balanced",),
    "clients_per_value": ("column:<name>", "folders"),
}
"""The partitions that use a setting, for settings not used by all."""
Classes = Annotated[Sequence[int], whole_numbers(",", "a list of class numbers, like 0,1,2")]
Rates = Annotated[
    tuple[UpToOne, ...],
    Text(
        "a rate, or several for the clients in turn, like 0.2 or 0.4,0",
        lambda text: [float(rate) for rate in str(text).split(",")],
        lambda rates: ",".join(map(plain, rates)),
        kinds=str | int | float,
    ),
]
Sizes = Annotated[tuple[Count, Count], whole_numbers("/", "training/test samples per client, like 500/100")]


@dataclass(frozen=True)
class Shift:
    """A feature shift that grows evenly from the first client, which has none, to the last, which has all of it.

    `kind`: noise, of this standard deviation, in units of samples as models see them (images: 0 to 1); or rotation, of
    images, by this number of degrees.
    """

    kind: str
    level: float

    @classmethod
    def read(cls, text: str) -> Self:
        """From `noise=0.5` or `rotation=60`. Raises UserError."""
        kind, _, number = text.partition("=")
        try:
            level = float(number)
        except ValueError:
            level = float("nan")
        most = {"noise": float("inf"), "rotation": 180.0}.get(kind)
        if most is None or not isfinite(level) or not 0 < level <= most:
            raise UserError(
                f"shift is noise=LEVEL or rotation=DEGREES, like rotation=60, not {text!r}; levels are above 0, "
                "rotations at most 180 degrees"
            )
        return cls(kind, level)

    def __str__(self) -> str:
        return f"{self.kind}={plain(self.level)}"


@reads_text
@dataclass(frozen=True)
class Partition(Group):
    """The clients, and how a dataset is partitioned among them.

    >>> from fewbytes.data import Partition, federate, load_dataset
    >>> partition = Partition("pathological", clients=5, classes_per_client=2)
    >>> counts = federate(load_dataset("digits"), partition).label_counts()["train"]
    >>> [sum(n > 0 for n in client) for client in counts]
    [2, 2, 2, 2, 2]
    """

    title: ClassVar[str] = "Clients"
    given: ClassVar[str] = "fewbytes.data.Partition({})"

    partition: str = setting(
        "dirichlet",
        f"Partition: {', '.join(PARTITIONS)}, column:<name> (a client per value), folders (a client per "
        "folder of a domain or group), flwr:<Partitioner>, or local (each client has its own data).",
        metavar="NAME",
    )
    clients: Count = setting(10, "Number of clients (partitions column and folders: it follows from the values).")
    alpha: Positive = setting(
        0.5, "Dirichlet alpha (partitions dirichlet and quantity): smaller values give more different clients."
    )
    classes_per_client: Count = setting(2, "Number of classes per client (partition pathological).")
    shards_per_client: Count = setting(2, "Number of shards per client (partition shards).")
    main_share: Share = setting(
        0.8, "Fraction of a client's samples from its main classes (partition main-category).", brief=True
    )
    shots: Count | None = setting(
        None, "Training samples per class and client (partition balanced; default: all).", brief=True
    )
    clients_per_value: Count = setting(
        1, "Number of clients among which a value's or folder's samples are split (partitions column and folders)."
    )
    samples: Sizes | None = setting(None, "Fixed number of samples per client, e.g. 500/100.", metavar="TRAIN/TEST")
    test: Literal["own-share", "held-classes"] = setting(
        "own-share",
        "Test data of a client: own-share (its share of the test set), or held-classes (all test samples of the "
        "classes it holds).",
        metavar="NAME",
        brief=True,
    )
    partition_options: dict[str, Any] = setting(
        {}, "Option of a flwr: partitioner.", option="--partition-option", metavar="KEY=VALUE"
    )
    label_noise: Rates | None = setting(
        None,
        "Fraction of a client's training labels to replace by other classes: 0.2, or for the clients in turn: 0.4,0.",
        metavar="RATES",
        brief=True,
    )
    shift: Shift | None = setting(
        None,
        "Feature shift that grows from the first client to the last: noise=0.5 (standard deviation) or rotation=60 "
        "(degrees).",
        metavar="KIND=LEVEL",
        brief=True,
    )
    newcomers: Whole = setting(0, "Number of clients that join later, with other classes.", brief=True)
    arrival: Count | None = setting(
        None, "Round in which newcomers join (default: the first of the second half).", brief=True
    )
    newcomers_a_round: Count | None = setting(
        None, "Number of newcomers that join per round (default: all at once).", brief=True
    )
    stay: bool = setting(
        False, "Keep or drop the other clients when newcomers join.", option="--stay/--leave", brief=True
    )
    known_classes: Classes | None = setting(
        None, "Classes of the other clients, e.g. 0,1,2 (default: a random half).", metavar="LIST", brief=True
    )
    newcomer_classes: Classes | None = setting(
        None, "Classes of the newcomers (default: the rest).", metavar="LIST", brief=True
    )

    def __post_init__(self) -> None:
        """As in `Group`; raises UserError for an unknown partition, too."""
        super().__post_init__()
        name = self.partition
        if name not in (*PARTITIONS, "local", "folders") and not name.startswith("flwr:") and not self.column:
            raise UserError(
                f"unknown partition {name!r}{suggestion(name, PARTITIONS)}; "
                f"there are {', '.join(PARTITIONS)}, column:<name> for a client per value of a column, folders for one "
                "per folder of a domain or group, flwr:<Name> for those of flwr-datasets, and local for data of each "
                "client's own"
            )
        options = self.partition_options
        takes = name == "quantity" or (name == "dirichlet" and not self.samples)
        if options and not (name.startswith("flwr:") or (takes and set(options) == {"min_samples"})):
            raise UserError(f"partition {name!r} does not take these options: {', '.join(options)}; leave them out")
        if takes and not (isinstance(least := options.get("min_samples", 1), int) and least > 0):
            raise UserError(f"min_samples is a whole number above 0, not {least!r}")
        given = (self.known_classes, self.newcomer_classes, self.newcomers_a_round)
        if not self.newcomers and (self.stay or any(each is not None for each in given)):
            raise UserError(
                "known_classes, newcomer_classes, newcomers_a_round and stay need newcomers: give their number"
            )
        if self.column is not None and self.newcomers:
            raise UserError(f"partition {name} makes no newcomers: leave newcomers out, or use another partition")

    @property
    def column(self) -> str | None:
        """The column whose values are the clients; FOLDERS: their folders; None: another partition."""
        if self.partition == "folders":
            return FOLDERS
        return self.partition.removeprefix(COLUMN) if self.partition.startswith(COLUMN) else None
