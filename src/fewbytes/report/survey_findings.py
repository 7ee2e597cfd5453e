"""What a survey finds between sites: units that seem to differ, classes and columns that are missing, drift."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Literal

import msgspec
import numpy as np

from fewbytes.base.errors import listed
from fewbytes.methods.survey.figures import MEASURED, SURELY, ColumnFigures, pooled

APART = 1.7
"""The factor between two sites' values from which their units may differ."""
SPREAD = 0.35
"""How much the logarithm of that factor may vary between quantiles and deviations: a drift moves values otherwise."""
UNITS = (
    (18.016, "glucose in mg/dL and mmol/L"),
    (88.42, "creatinine in µmol/L and mg/dL"),
    (38.67, "cholesterol in mg/dL and mmol/L"),
    (88.57, "triglycerides in mg/dL and mmol/L"),
    (17.1, "bilirubin in µmol/L and mg/dL"),
    (2.8, "urea in mg/dL and blood urea nitrogen, or mmol/L"),
    (2.2046, "pounds and kilograms"),
    (2.54, "centimetres and inches"),
    (7.5006, "mmHg and kPa"),
    (12.0, "months and years, or dozens"),
    (365.25, "days and years"),
    (10.0, "g/L and g/dL, or millimetres and centimetres"),
    (100.0, "centimetres and metres, or percentages and shares"),
    (1000.0, "units and thousandths"),
)
"""Factors between common units."""
CLOSE = 0.06
"""How far a factor may be from one of UNITS, as a share."""
LARGE, SEEN = 0.5, 0.2
"""Differences from which drift is found, and is shown: in deviations, or in shares of samples."""
BEYOND = 3.0
"""With noise, smaller differences than this number of its standard deviations are not reported."""
BLURRED = 0.1
"""With noise, no factor is read from quantiles that it moves by a larger share of samples than this."""
MISSING = 0.2
"""The difference between shares of missing values from which it is found."""
Sites = Mapping[str, Mapping[str, ColumnFigures]]
"""The columns of each site that reports some, by name."""


class Finding(msgspec.Struct):
    """A sentence about a column between sites. `kind` says what it is about; `sites`: those that differ."""

    kind: Literal["units", "classes", "categories", "columns", "missing", "unreadable", "drift", "duplicates"]
    column: str
    sites: list[str]
    text: str


def findings(sites: Sites, target: Sequence[str], least: int) -> list[Finding]:
    """All findings, the most urgent first."""
    found: list[Finding] = []
    whole = {name: of for name, of in sites.items() if set(of) - set(target)}  # sites that tell more than classes
    for column in dict.fromkeys(name for each in sites.values() for name in each):
        of = {site: columns[column] for site, columns in sites.items() if column in columns}
        lacking = [site for site in whole if column not in sites[site]]
        found += _of_presence(column, of, lacking)
        kinds = {figures.kind for figures in of.values()}
        if len(of) > 1 and kinds <= set(MEASURED):
            found += _of_numbers(column, of)
        elif len(of) > 1 and kinds == {"categories"}:
            found += _of_categories(column, of, column in target, least)
    order = ("units", "unreadable", "columns", "classes", "categories", "missing", "drift")
    return sorted(found, key=lambda each: order.index(each.kind))


def drift(sites: Sites) -> dict[str, dict[str, float]]:
    """By column and site, the difference from the other sites together: of means, in deviations; of categories, the
    share of samples that would have to change category."""
    found: dict[str, dict[str, float]] = {}
    for column in dict.fromkeys(name for each in sites.values() for name in each):
        of = {site: columns[column] for site, columns in sites.items() if column in columns}
        differences = {site: _difference(of, site) for site in of} if len(of) > 1 else {}
        if known := {site: round(value, 4) for site, value in differences.items() if value is not None}:
            found[column] = known
    return found


def _difference(of: Mapping[str, ColumnFigures], site: str) -> float | None:
    here, others = of[site], pooled(each for name, each in of.items() if name != site)
    if here.kind != others.kind:
        return None
    if here.mean is not None and others.mean is not None:
        spread = math.sqrt(((here.deviation or 0.0) ** 2 + (others.deviation or 0.0) ** 2) / 2)
        spread = spread or pooled([here, others]).deviation or 1.0  # equal values at each site, but not the same
        return (here.mean - others.mean) / spread
    if here.kind != "categories" or not here.categories or not others.categories:
        return None
    a, b = (_shares(each) for each in (here, others))
    return sum(abs(a.get(name, 0.0) - b.get(name, 0.0)) for name in {*a, *b}) / 2


def _shares(figures: ColumnFigures) -> dict[str, float]:
    counts = {**figures.categories, "": figures.other or 0}
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items() if count}


# Numbers --------------------------------------------------------------------------------------------------------------


def _of_numbers(column: str, of: Mapping[str, ColumnFigures]) -> Iterator[Finding]:
    measured = {site: figures for site, figures in of.items() if figures.mean is not None}
    factors = {(a, b): factor(measured[a], measured[b]) for a, b in itertools.permutations(measured, 2)}
    like = {a: [b for b in measured if a == b or not factors[a, b]] for a in measured}
    base = max(measured, key=lambda site: (len(like[site]), measured[site].rows), default="")
    apart = {site: times for site in measured if site != base and (times := factors[site, base])}
    for site, times in apart.items():
        here, there = (_number(measured[each].quantile(0.5)) for each in (site, base))
        ratio = f"{times:.3g} times" if times > 1 else f"1/{1 / times:.3g} of"
        known = known_units(times)
        text = f"{column!r}: values at {site} are about {ratio} those at {base} (medians {here} and {there})"
        yield Finding(
            "units", column, [site], f"{text}{f', as between {known}' if known else ''}: are the units equal?"
        )
    for site, figures in measured.items():
        if site in apart or site == base or not _is_fahrenheit(figures, measured[base]):
            continue
        text = (
            f"{column!r}: values at {site} and {base} differ as degrees Fahrenheit and Celsius do: are the units equal?"
        )
        apart[site] = 1.0
        yield Finding("units", column, [site], text)
    same = {site: figures for site, figures in measured.items() if site not in apart}
    for site in same if len(same) > 1 else ():
        value = _difference(same, site)
        if value is not None and abs(value) >= LARGE and _is_beyond_noise(same, site, value):
            direction = "above" if value > 0 else "below"
            yield Finding(
                "drift", column, [site],
                f"{column!r}: the mean at {site} is {abs(value):.2f} deviations {direction} the other sites' "
                f"({_number(same[site].mean)}, there {_number(pooled(f for s, f in same.items() if s != site).mean)})",
            )  # fmt: skip


def _is_beyond_noise(of: Mapping[str, ColumnFigures], site: str, value: float) -> bool:
    """Whether a difference of a site from the others is more than noise makes."""
    here, others = of[site], pooled(each for name, each in of.items() if name != site)
    if here.mean is None or others.mean is None:
        return value > BEYOND * math.hypot(here.share_error, others.share_error)
    return abs(here.mean - others.mean) > BEYOND * math.hypot(here.mean_error, others.mean_error)


def factor(here: ColumnFigures, there: ColumnFigures) -> float:
    """The constant factor by which the values here exceed those there, if there seems to be one of APART or more (or
    its inverse); else 0."""
    if max(here.share_error, there.share_error) > BLURRED:
        return 0.0
    pairs = [(here.quantile(share), there.quantile(share)) for share in (0.1, 0.25, 0.5, 0.75, 0.9)]
    pairs += [(here.deviation, there.deviation), (here.mean, there.mean)]
    logs = [math.log(a / b) for a, b in pairs if a and b and a * b > 0]
    if len(logs) < len(pairs) or max(logs) - min(logs) > SPREAD:
        return 0.0
    times = math.exp(float(np.median(logs)))
    return times if max(times, 1 / times) >= APART else 0.0


def known_units(times: float) -> str:
    """The units that are this factor apart, in words; empty if none are."""
    size = max(times, 1 / times)
    near = [(abs(size / known - 1), words) for known, words in UNITS]
    distance, words = min(near)
    return words if distance <= CLOSE else ""


def _is_fahrenheit(here: ColumnFigures, there: ColumnFigures) -> bool:
    for warm, cold in ((here, there), (there, here)):
        if not warm.deviation or not cold.deviation or warm.mean is None or cold.mean is None:
            return False
        if (
            abs(warm.deviation / cold.deviation / 1.8 - 1) < 0.25
            and abs(warm.mean - 1.8 * cold.mean - 32) < warm.deviation
        ):
            return abs(warm.mean - cold.mean) > 2 * warm.deviation
    return False


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


# Categories and presence ----------------------------------------------------------------------------------------------


def _of_categories(column: str, of: Mapping[str, ColumnFigures], learnt: bool, least: int) -> Iterator[Finding]:
    reported = {site: set(figures.categories) for site, figures in of.items() if figures.categories}
    every = set[str]().union(*reported.values())
    named_from = max(
        least, math.ceil(SURELY * max(figures.noise for figures in of.values()))
    )  # with noise, to be named
    few = f"no sample, or fewer than {named_from}," if named_from > 1 else "no sample"
    odd = [site for site in reported if _own(reported, site) and every - reported[site]]
    usual = {site: names for site, names in reported.items() if site not in odd} or dict([*reported.items()][:1])
    expected = set[str]().union(*usual.values())
    for site, names in reported.items():
        kind: Literal["classes", "categories"] = "classes" if learnt else "categories"
        if site not in usual:
            text = f"{column!r}: {site} has {listed(sorted(names - expected))}, which other sites lack"
            lacking = sorted(expected - names)
            text += f", and lacks {listed(lacking)}" if lacking else ""
            yield Finding(kind, column, [site], f"{text}: do they mean the same?")
        elif expected - names:
            yield Finding(kind, column, [site], f"{column!r}: {site} has {few} of {listed(sorted(expected - names))}")
    by = {name: name.strip().casefold() for name in every}
    for written in sorted({w for w in by.values() if sum(w == other for other in by.values()) > 1}):
        spelt = sorted(name for name, other in by.items() if other == written)
        where = [site for site, known in reported.items() if known & set(spelt)]
        yield Finding(
            "categories", column, where, f"{column!r}: {listed(spelt)} are spellings of one category: choose one"
        )
    for site in usual if len(usual) > 1 else ():
        value = _difference({name: of[name] for name in usual}, site)
        here, others = [of[site]], [figures for name, figures in of.items() if name != site]
        doubt = sum(_unnamed(each, every, named_from - 1) for each in (here, others))
        if value is not None and value - doubt >= SEEN and _is_beyond_noise(of, site, value):
            text = (
                f"{column!r}: the categories at {site} differ from the other sites' in {100 * value:.0f} % of samples"
            )
            yield Finding("drift", column, [site], text)


def _unnamed(figures: Sequence[ColumnFigures], every: Set[str], most: int) -> float:
    """The share of samples that may be of categories that are not named, each of at most so many at a site."""
    rows = sum(most * len(every - each.categories.keys()) for each in figures)
    return rows / max(1, sum(each.known for each in figures))


def _own(reported: Mapping[str, set[str]], site: str) -> set[str]:
    """The categories that no other site has."""
    return reported[site] - set[str]().union(*(names for other, names in reported.items() if other != site))


def _of_presence(column: str, of: Mapping[str, ColumnFigures], lacking: Sequence[str]) -> Iterator[Finding]:
    if lacking:
        text = f"{column!r} is a column of {listed(list(of))}, and not of {listed(lacking)}"
        yield Finding("columns", column, list(lacking), text)
    kinds: dict[str, list[str]] = {}
    for site, figures in of.items():
        if figures.kind == "unreadable":
            yield Finding("unreadable", column, [site], f"{column!r} at {site} {figures.why}")
        elif figures.rows and figures.missing == figures.rows:
            yield Finding("missing", column, [site], f"{column!r} is empty at {site}")
        else:
            kinds.setdefault(figures.kind, []).append(site)
    if len(kinds) > 1:
        parts = " and ".join(f"{kind} at {listed(where)}" for kind, where in kinds.items())
        yield Finding("columns", column, [s for where in kinds.values() for s in where], f"{column!r} holds {parts}")
    shares = {s: (f.missing or 0) / f.rows for s, f in of.items() if f.rows and f.missing != f.rows}
    noise = max((figures.noise / max(1, figures.rows) for figures in of.values()), default=0.0)
    if shares and max(shares.values()) - min(shares.values()) >= max(MISSING, BEYOND * noise):
        site = max(shares, key=lambda s: shares[s])
        rest = max(share for s, share in shares.items() if s != site)
        here, there = (f"{100 * share:.0f} %" for share in (shares[site], rest))
        text = f"{column!r}: {here} of values are missing at {site}, at most {there} elsewhere"
        yield Finding("missing", column, [site], text)
