"""Settings of how a dataset is partitioned among clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from fewbytes.base.errors import UserError, suggestion
from fewbytes.base.ranges import Count, Positive, Share, Whole
from fewbytes.base.settings import Group, reads_text, setting, whole_numbers

PARTITIONS = ("balanced", "dirichlet", "iid", "main-category", "pathological", "shards")
"""The partitions `federate` knows by name, besides `flwr:<Name>`."""
USED_BY = {
    "alpha": ("dirichlet", "flwr:<Partitioner>"),
    "classes_per_client": ("pathological",),
    "shards_per_client": ("shards",),
    "main_share": ("main-category",),
    "shots": ("balanced",),
}
"""The partitions that use a setting, for settings not used by all."""
Classes = Annotated[Sequence[int], whole_numbers(",", "a list of class numbers, like 0,1,2")]
Sizes = Annotated[tuple[Count, Count], whole_numbers("/", "training/test samples per client, like 500/100")]


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
        f"Partition: {', '.join(PARTITIONS)}, flwr:<Partitioner>, or local (each client has its own data).",
        metavar="NAME",
    )
    clients: Count = setting(10, "Number of clients.")
    alpha: Positive = setting(0.5, "Dirichlet alpha: smaller values give more different clients.")
    classes_per_client: Count = setting(2, "Number of classes per client (partition pathological).")
    shards_per_client: Count = setting(2, "Number of shards per client (partition shards).")
    main_share: Share = setting(
        0.8, "Fraction of a client's samples from its main classes (partition main-category).", brief=True
    )
    shots: Count | None = setting(
        None, "Training samples per class and client (partition balanced; default: all).", brief=True
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
        if name not in (*PARTITIONS, "local") and not name.startswith("flwr:"):
            raise UserError(
                f"unknown partition {name!r}{suggestion(name, PARTITIONS)}; "
                f"there are {', '.join(PARTITIONS)}, flwr:<Name> for those of flwr-datasets, and local for data of "
                "each client's own"
            )
