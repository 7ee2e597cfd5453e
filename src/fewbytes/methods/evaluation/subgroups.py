"""Subgroups of a site's test samples in an evaluation: what a site reports of them, so that none of few is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from fewbytes.base.errors import UserError
from fewbytes.core.site import Site
from fewbytes.core.tested import Predictions, Scored, defined
from fewbytes.data.subgroups import By, column_values, groups_of
from fewbytes.data.surveyed import OnTerms, terms_of
from fewbytes.wire import payload

REASONS = {
    "tell": "tell is not figures there",
    "column": "there is no such column",
    "numbers": "numbers need limits that all sites share, such as --by {column}=50,70",
    "few": "each has fewer test samples than min-count, or would show one that has",
}
"""Why a site reports no subgroups, by the word that it sends."""


@payload
class Subgroup:
    """A subgroup at a site: its name, number of test samples, and the main metric with its interval; None where
    undefined."""

    name: str
    samples: int
    value: float | None
    low: float | None
    high: float | None


def subgroups_at(site: Site, found: Predictions, asked: str) -> tuple[list[Subgroup], str]:
    """What a site reports of subgroups of its test samples, `found` their predictions; or why it reports none, one of
    REASONS. `asked`: the column, as `By` reads it; empty: none are asked for."""
    if not asked:
        return [], ""
    terms, by = terms_of(site.test), By.read(asked)
    if terms.tell != "figures":
        return [], "tell"
    if not isinstance(site.test, OnTerms) or site.test.schema is None:
        return [], "column"
    try:
        values = column_values(site.test.place, site.test.schema, by.column, "test", site.test)
    except UserError:
        return [], "column"
    if not by.shared(values):
        return [], "numbers"
    order, names = groups_of(values, by.limits)
    shown = [name for name in order if name in large_enough(Counter(names), terms.min_count)]
    groups, metric = [], site.problem.objective.metrics[0]
    for group in shown:
        part = found.rows(torch.tensor([i for i, name in enumerate(names) if name == group]).long())
        groups.append(Subgroup(group, len(part), *defined(Scored.of(metric, part, site.problem.seed).figure)))
    return groups, "" if groups else "few"


def large_enough(counts: Mapping[str, int], least: int) -> set[str]:
    """The groups of at least `least` samples, without the smallest of them if fewer than `least` samples are in none of
    the others: these would follow from the figures of all samples.

    >>> from fewbytes.methods.evaluation.subgroups import large_enough
    >>> sorted(large_enough({"f": 40, "m": 30, "missing": 3}, 10))
    ['f']
    >>> sorted(large_enough({"f": 40, "m": 30, "x": 6, "y": 5}, 10))
    ['f', 'm']
    """
    hidden, shown = 0, set[str]()
    for name, count in sorted(counts.items(), key=lambda each: each[1]):
        if count < least or 0 < hidden < least:
            hidden += count
        else:
            shown.add(name)
    return shown


def check_subgroups(groups: Sequence[Subgroup], why: str, samples: int) -> bool:
    """Whether reported subgroups of `samples` test samples add up."""
    sizes, names = [each.samples for each in groups], {each.name for each in groups}
    sound = min(sizes, default=1) > 0 and sum(sizes) <= samples and len(names) == len(groups)
    return sound and (not groups or not why) and why in ("", *REASONS)
