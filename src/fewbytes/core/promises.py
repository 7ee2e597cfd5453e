"""What a method promises of itself: what its clients send, what its server half allows a run to do."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, fields

from fewbytes.base.errors import MethodError
from fewbytes.core.promise import Protected


@dataclass(frozen=True, kw_only=True)
class Promises:
    """What a method promises of itself, as its attribute `promises`; laws hold it to that.

    What is no promise, but what the method takes, is `Method.needs`. Raises MethodError for a value of another type.

    >>> import fewbytes as fb
    >>> promises = fb.Promises(sends="its last layer", headline="personalised")
    >>> promises.sends, promises.sums, fb.FedAvg.promises.sums
    ('its last layer', False, True)
    """

    sends: str = ""
    """What a client sends a round, in a few words."""
    headline: str = "global"
    """The accuracy the method's paper reports: `global`, `personalised`, or a name its handlers score."""
    models_differ: bool = False
    """Whether clients may have models of their own."""
    float32_only: bool = False
    """Whether it calls parts of models, or computes with their values, in float32: models of another type are
    refused."""
    brings_loss: bool = False
    """Whether clients train by a loss of the method's: a task's own loss and class weights are refused."""
    scored_after_finish: bool = False
    """Whether `finish` changes the models the paper scores, so that they are scored once more after it."""
    finish_exchanges: bool = True
    """Whether `finish` asks clients for something; if not, the server works on alone."""
    streams: bool = False
    """Whether its server takes replies as they come (`Network.stream`): clients are then at work while rounds go by."""
    aggregates: Set[str] = frozenset()
    """Which rules (`fewbytes.core.rules`) bear on all the means that its server takes of what clients send: it asks for
    them by `net.mean`, `net.entry_means` or, where they are no plain means, `net.clipped`."""
    protects: Set[Protected] = frozenset()
    """Whose privacy a run of it can promise (`fewbytes.core.promise`). Of clients: what its server takes over from
    replies is one `net.mean` or `net.entry_means` a round. Of samples: what a client sends follows from one `site.fit`
    a round, by the terms of `local`, whose hooks see no data; and from how many samples it has."""
    sums: bool = False
    """Whether its server takes nothing from replies but one mean of them all, weighted by their samples or not at all,
    so that it can be run without seeing any (`fewbytes.methods.parts.secure`)."""
    hides: bool = False
    """Whether the values in replies are hidden from its server by masks."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            kind, words = _KINDS[type(each.default)]
            if not isinstance(value, kind):
                raise MethodError(f"Promises: {each.name} must be {words}, not {value!r}")


_KINDS = {str: (str, "text"), bool: (bool, "true or false"), frozenset: (Set, "a set of names")}
