"""A method's declared properties: what its clients send, and what its server half allows a run to do."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, fields

from fewbytes.base.errors import MethodError
from fewbytes.core.promise import Protected


@dataclass(frozen=True, kw_only=True)
class Promises:
    """A method's declared properties, its attribute `promises`; tests check them.

    Its requirement on objectives is `Method.needs`. Raises MethodError for a value of another type.

    >>> import fewbytes as fb
    >>> promises = fb.Promises(sends="its last layer", headline="personalised")
    >>> promises.sends, promises.sums, fb.FedAvg.promises.sums
    ('its last layer', False, True)
    """

    sends: str = ""
    """A client's messages in a round, in a few words."""
    headline: str = "global"
    """The accuracy that the method's paper reports: `global`, `personalised`, or a name its handlers score."""
    models_differ: bool = False
    """Whether clients may have different models."""
    keeps_own: bool = False
    """Whether the entries that clients keep for themselves (`fewbytes.base.state.own_entries`) are left out of its
    messages."""
    float32_only: bool = False
    """Whether it calls parts of models, or computes with their values, in float32: models of other types are
    refused."""
    brings_loss: bool = False
    """Whether clients train with the method's own loss: a task's own loss and class weights are refused."""
    scored_after_finish: bool = False
    """Whether `finish` changes the paper's scored models, so that they are scored again after it."""
    finish_exchanges: bool = True
    """Whether `finish` sends requests to clients; if not, only the server works."""
    streams: bool = False
    """Whether its server takes replies as they arrive (`Network.stream`): clients then work across rounds."""
    normalises_steps: bool = False
    """Whether its server weights replies correctly whatever their clients' numbers of local steps, which a run may then
    set for each (`--round-time`): its handlers train once, with `site.lasting(self.local)`."""
    aggregates: Set[str] = frozenset()
    """The rules (`fewbytes.core.rules`) that apply to all of its server's means of clients' replies. It gets them from
    `net.mean`, `net.entry_means` or, for other than plain means, `net.clipped`."""
    protects: Set[Protected] = frozenset()
    """The unit of privacy that a run of it can give (`fewbytes.core.promise`). Clients: its server uses replies only in
    one `net.mean` or `net.entry_means` a round. Samples: a client's messages follow from one `site.fit` a round, with
    the terms of `local`, whose hooks see no data, and from its number of samples."""
    sums: bool = False
    """Whether its server uses replies only in one mean of them all, weighted by samples or unweighted, so that secure
    aggregation applies (`fewbytes.methods.parts.secure`)."""
    hides: bool = False
    """Whether masks hide the values in replies from its server."""
    describes: bool = False
    """Whether clients only describe their data, and train nothing: data are read as they are, without a server's."""
    evaluates: bool = False
    """Whether clients only test models, and reply with figures about them (also under `evaluate-only`)."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            kind, words = _KINDS[type(each.default)]
            if not isinstance(value, kind):
                raise MethodError(f"Promises: {each.name} must be {words}, not {value!r}")


_KINDS = {str: (str, "text"), bool: (bool, "true or false"), frozenset: (Set, "a set of names")}
