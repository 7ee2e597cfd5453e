"""Survey: the sites of a consortium describe their data to each other, as far as each allows, and nothing is trained.

Each site replies once. If its `tell` is `figures`, it sends for every column of a table the number of missing values,
mean, deviation and cells of values, or the number of samples in each category; for pictures their sizes, depth and
brightness, for texts their lengths. If it is `labels`, it sends this only for what is learnt; if it is `sizes`, only
its number of samples; if it is `nothing`, nothing. No figure is of fewer than `min_count` samples. Three or more sites
that tell equally little also add to a sum that hides them (`fewbytes.methods.survey.sums`).

Bytes per client, before lossless coding: about 16 C + 40 up for each column, for at most C = 64 cells; with duplicates,
8 more for each sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from blake3 import blake3

from fewbytes.base.errors import MethodError, UserError
from fewbytes.base.ranges import MOST_SAMPLES, Count
from fewbytes.core.method import Asked, Method
from fewbytes.core.network import Network
from fewbytes.core.privacy import SamplePrivacy
from fewbytes.core.problem import Id, Problem
from fewbytes.core.promise import Privacy
from fewbytes.core.promises import Promises
from fewbytes.core.site import Site
from fewbytes.data.surveyed import Figures
from fewbytes.methods.parts.exchange import LEAST
from fewbytes.methods.parts.summing import SummingNetwork
from fewbytes.methods.survey.figures import CELLS, MOST_NAMED, ColumnFigures, describe, pooled_columns
from fewbytes.methods.survey.noisy import noisy_figures
from fewbytes.methods.survey.sums import TOTALS, Plan, added_up, described_at, plan_of, read_sums
from fewbytes.wire import payload

DIGEST = 8
"""Bytes of a sample's salted digest."""
HIDDEN = ("nothing", "sizes", "labels")
"""What sites tell that add to hidden sums, one for each of these."""


@payload
class ToldColumn:
    """A column that a site describes: fields of `ColumnFigures`, and the number of edges of its cells."""

    name: str
    kind: str
    rows: int
    missing: int | None
    mean: float | None
    deviation: float | None
    edges: int
    cells: int
    categories: dict[str, int]
    other: int | None
    why: str
    noise: float


@payload
class Reported:
    """What a site reports: its number of samples (None: not reported), the names of the columns to learn, all columns,
    and the edges and counts of their cells, column after column. `near`: digests of its samples, ascending, without
    repeats; empty if it does not take part. `ignored`: columns that are left out, as asked."""

    tells: str
    samples: int | None
    target: list[str]
    columns: list[ToldColumn]
    edges: torch.Tensor  # float64
    counts: torch.Tensor  # int64
    near: bytes
    ignored: list[str]

    @classmethod
    def of(
        cls,
        tells: str,
        samples: int | None,
        target: Sequence[str],
        columns: Mapping[str, ColumnFigures],
        near: bytes = b"",
        ignored: Sequence[str] = (),
    ) -> Reported:
        """From figures by column."""
        reported = [
            ToldColumn(
                name, f.kind, f.rows, f.missing, f.mean, f.deviation, len(f.edges), len(f.counts), f.categories,
                f.other, f.why, f.noise,
            )
            for name, f in columns.items()
        ]  # fmt: skip
        edges = [edge for f in columns.values() for edge in f.edges]
        counts = [count for f in columns.values() for count in f.counts]
        return cls(
            tells, samples, list(target), reported, torch.tensor(edges, dtype=torch.float64),
            torch.tensor(counts, dtype=torch.int64), near, list(ignored),
        )  # fmt: skip

    def figures(self) -> dict[str, ColumnFigures]:
        """The figures by column."""
        found, at, to = {}, 0, 0
        for c in self.columns:
            edges = self.edges[at : at + c.edges].tolist()
            counts = self.counts[to : to + c.cells].tolist()
            at, to = at + c.edges, to + c.cells
            found[c.name] = ColumnFigures(
                c.kind,
                c.rows,
                c.missing,
                c.mean,
                c.deviation,
                edges,
                counts,
                dict(c.categories),
                c.other,
                c.why,
                c.noise,
            )
        return found


def check_reported(client: Id, reported: Reported) -> None:
    """Raises MethodError for a reply that does not add up."""
    edges, cells = (sum(getattr(c, name) for c in reported.columns) for name in ("edges", "cells"))
    sound = len(reported.edges) == edges and len(reported.counts) == cells and len(reported.near) % DIGEST == 0
    for c in reported.columns:
        sound &= 0 <= c.edges < CELLS and c.cells in (0, c.edges + 1) and len(c.categories) <= MOST_NAMED
        sound &= c.rows >= 0 and 0 <= (c.missing or 0) <= c.rows and (c.deviation or 0) >= 0 and c.noise >= 0
        sound &= (c.mean is None) == (c.deviation is None) and (c.cells == 0) == (c.mean is None)
    if not sound or bool((reported.counts < 0).any()):
        raise MethodError("its description of its data does not add up")


@dataclass
class Gathered:
    """The server's state: what each site reported; and by what sites tell, the plan and the sum of their vectors."""

    reported: dict[int, Reported] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    sums: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def hidden(self, least: int) -> dict[str, tuple[int, dict[str, ColumnFigures]]]:
        """By what sites tell, (number of samples, figures by column) of these sites together."""
        return {tells: read_sums(self.plans[tells], sums, least) for tells, sums in self.sums.items()}


@dataclass(frozen=True)
class Survey(Method):
    """Settings of a survey."""

    min_count: Count = 10  # figures of fewer samples are not shown
    duplicates: bool = False  # look for near-duplicates between sites that have a common salt
    like: str = "{}"  # `ColumnFigures` by column, as JSON: the columns to sum up, if no site tells its own

    promises = Promises(sends="a description of its data", describes=True, protects={"samples"})

    def runs(self) -> tuple[Method, ...]:
        return (self, *TOTALS.runs())

    def handle(self, handler: str, state: Any, message: Any, site: Site) -> Any:
        if handler == self.introduce.__name__:
            return self.introduce(state, message, site)
        return TOTALS.handle(handler, state, message, site)

    def state_class(self, half: Literal["server", "client"]) -> type[Any] | None:
        return super().state_class(half) if half == "server" else TOTALS.state_class(half)

    def promising(self, task: Asked, dp: Privacy | str | None, rounds: int) -> Asked:
        """The task with one noisy release of each client's samples. Raises UserError for privacy of clients."""
        privacy = Privacy.read(dp) if isinstance(dp, str) else dp
        if privacy is None:
            return task
        privacy.check(self.method_name, self.promises.protects)
        if self.duplicates:
            raise UserError("digests of samples cannot be reported with noise: leave out --duplicates, or --dp")
        terms = SamplePrivacy(privacy, 1, 1, MOST_SAMPLES, steps=1)
        agreed = {**task.problem.agreed, "dp": f"{privacy}, once"}
        return replace(task, problem=replace(task.problem, privacy=terms, agreed=agreed))  # type: ignore[type-var]

    @property
    def alike(self) -> dict[str, ColumnFigures]:
        """The columns of `like`. Raises UserError for a text that is none."""
        try:
            return msgspec.json.decode(self.like, type=dict[str, ColumnFigures])
        except msgspec.MsgspecError as error:
            raise UserError(f"the columns of a survey (like) cannot be read: {error}") from None

    def planned_rounds(self, asked: int) -> int:
        return 1

    def goes_back(self, handler: str) -> bool:
        return handler == self.introduce.__name__ or TOTALS.goes_back(handler)

    def server(self, problem: Problem) -> Gathered:
        return Gathered()

    def client(self, site: Site) -> Any:
        return TOTALS.client(site)

    def round(self, state: Gathered, net: Network, t: int) -> None:
        state.reported = dict(net.call(self.introduce, to=net.clients, check=check_reported))
        known = self.alike | pooled_columns(
            [reported.figures() for reported in state.reported.values() if reported.tells == "figures"]
        )
        for tells in HIDDEN:
            sites = [i for i, reported in state.reported.items() if reported.tells == tells]
            plan = plan_of(tells, known)
            if len(sites) < LEAST or not plan.columns or net.problem.privacy is not None:
                continue
            hidden = SummingNetwork(TOTALS, net.among(sites, f"sites that tell {tells}"))
            for _, reply in hidden.call(TOTALS.inner.add, to=sites, send=plan):  # type: ignore[attr-defined]
                state.plans[tells] = plan
                state.sums[tells] = added_up(reply.sums.dense(), len(sites))

    def introduce(self, state: Any, message: None, site: Site) -> Reported:
        """What the site reports of its data."""
        about, terms = described_at(site)
        least = max(self.min_count, terms.min_count)
        samples = about.rows if terms.tell != "nothing" and about.rows >= least else None
        reported = {"figures": list(about.columns), "labels": list(about.target)}.get(terms.tell, [])
        described = {name: about.columns[name] for name in reported if samples and name in about.columns}
        if site.problem.privacy is not None and samples:
            samples, columns = noisy_figures(site, described, samples, least)
        else:
            columns = {name: describe(column, least) for name, column in described.items()}
        near = self.digests(about, terms.salt) if self.duplicates and terms.salt and samples else b""
        target = [name for name in about.target if name in columns]
        ignored = about.ignored if samples and terms.tell == "figures" else ()
        return Reported.of(terms.tell, samples, target, columns, near, ignored)

    def digests(self, about: Figures, salt: str) -> bytes:
        """Salted digests of the samples, ascending, without repeats."""
        key = blake3(salt.encode(), derive_key_context="fewbytes survey, near-duplicates of samples").digest()
        found = {blake3(each, key=key).digest()[:DIGEST] for each in about.near}
        return b"".join(sorted(found))


def common(sites: Mapping[Id, Reported]) -> dict[tuple[Id, Id], int]:
    """By pair of sites, the number of samples of one that have a near-duplicate at the other."""
    near = {
        i: set(np.frombuffer(reported.near, f"S{DIGEST}").tolist()) for i, reported in sites.items() if reported.near
    }
    return {(i, j): len(near[i] & near[j]) for i in near for j in near if i < j}
