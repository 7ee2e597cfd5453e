"""Settings of how a data set is dealt out."""

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
"""The partitions that use a setting that not all do."""
Classes = Annotated[Sequence[int], whole_numbers(",", "a list of class numbers, like 0,1,2")]
Sizes = Annotated[tuple[Count, Count], whole_numbers("/", "training/test samples per client, like 500/100")]


@reads_text
@dataclass(frozen=True)
class Partition(Group):
    """Who the clients are, and how a data set is dealt out to them.

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
        f"{', '.join(PARTITIONS)}, flwr:<Partitioner>, or local: data of each client's own.",
        metavar="NAME",
    )
    clients: Count = setting(10, "Number of clients.")
    alpha: Positive = setting(0.5, "Dirichlet alpha: the smaller, the less alike the clients.")
    classes_per_client: Count = setting(2, "For pathological.")
    shards_per_client: Count = setting(2, "For shards.")
    main_share: Share = setting(
        0.8, "For main-category: part of a client's samples that is of its main classes.", brief=True
    )
    shots: Count | None = setting(
        None, "For balanced: training samples a client has of each class (default: all there are).", brief=True
    )
    samples: Sizes | None = setting(None, "Fixed samples per client, e.g. 500/100.", metavar="TRAIN/TEST")
    test: Literal["own-share", "held-classes"] = setting(
        "own-share",
        "What a client is tested on: own-share of the test set, or held-classes, all of it of classes it holds.",
        metavar="NAME",
        brief=True,
    )
    partition_options: dict[str, Any] = setting(
        {}, "An option of a flwr: partitioner.", option="--partition-option", metavar="KEY=VALUE"
    )
    newcomers: Whole = setting(0, "Further clients, with classes of their own, that come later.", brief=True)
    arrival: Count | None = setting(
        None, "Round the newcomers come in (default: the first of the second half).", brief=True
    )
    newcomers_a_round: Count | None = setting(
        None, "How many newcomers come in that round and in each after it (default: all at once).", brief=True
    )
    stay: bool = setting(
        False, "Whether the other clients go on when newcomers come.", option="--stay/--leave", brief=True
    )
    known_classes: Classes | None = setting(
        None, "The other clients' classes, e.g. 0,1,2 (default: half, drawn).", metavar="LIST", brief=True
    )
    newcomer_classes: Classes | None = setting(
        None, "The newcomers' classes (default: the rest).", metavar="LIST", brief=True
    )

    def __post_init__(self) -> None:
        """Raises UserError for a partition there is not, too."""
        super().__post_init__()
        name = self.partition
        if name not in (*PARTITIONS, "local") and not name.startswith("flwr:"):
            raise UserError(
                f"unknown partition {name!r}{suggestion(name, PARTITIONS)}; "
                f"there are {', '.join(PARTITIONS)}, flwr:<Name> for those of flwr-datasets, and local for data of "
                "each client's own"
            )
