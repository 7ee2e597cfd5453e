"""A survey's result, survey.json: what each site reported, the sums over all sites, and findings in sentences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.files import replacing
from fewbytes.base.parquet import read_parquet
from fewbytes.methods.survey.figures import ColumnFigures, pooled_columns
from fewbytes.methods.survey.survey import Gathered, Reported, common
from fewbytes.report.survey_findings import Finding, drift, findings
from fewbytes.running.checkpoint import read_checkpoint
from fewbytes.wire import unpack_state

NAME = "survey.json"
VERSION = 1
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""The quantiles that survey.json and the page have."""


class SurveyedSite(msgspec.Struct):
    """A site: what it `tells`, its number of samples (None: not reported), its columns, and its bytes up and down."""

    name: str
    tells: str
    samples: int | None
    columns: dict[str, ColumnFigures]
    uplink_bytes: int = 0
    downlink_bytes: int = 0


class HiddenSum(msgspec.Struct):
    """Sites that tell equally little, together."""

    tells: str
    sites: list[str]
    samples: int | None
    columns: dict[str, ColumnFigures]


class Common(msgspec.Struct):
    """Near-duplicates between two sites (None: fewer than the minimum, but some)."""

    sites: tuple[str, str]
    samples: int | None


class SurveyFile(msgspec.Struct):
    """The content of survey.json. `pooled`: the columns over all sites that tell their figures or are in a sum.
    `drift`: by column and site, how far the site's is from the others' together. `left_out`: sites in no pooled
    figure; `small`: those of them that have fewer samples than the minimum. `unknown`: columns that were named, and no
    site has."""

    survey: int
    min_count: int
    target: list[str]
    sites: list[SurveyedSite]
    hidden: list[HiddenSum] = []
    pooled: dict[str, ColumnFigures] = {}
    quantiles: dict[str, dict[str, float]] = {}
    drift: dict[str, dict[str, float]] = {}
    findings: list[Finding] = []
    common: list[Common] = []
    left_out: list[str] = []
    small: list[str] = []
    unknown: list[str] = []
    absent: list[str] = []
    dp: str = ""
    uplink_bytes: int = 0
    downlink_bytes: int = 0

    @classmethod
    def read(cls, path: Path) -> SurveyFile:
        """Read a survey.json. Raises UserError for another file."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise UserError(f"the survey {path} cannot be read: {error.strerror}") from None
        except msgspec.MsgspecError as error:
            raise UserError(f"{path} is not a survey.json, as `fewbytes survey` writes it: {one_line(error)}") from None


def survey_of(folder: Path, names: Sequence[str] = ()) -> SurveyFile:
    """The result of a survey in its run folder. `names`: of the sites, by client. Raises UserError for a folder without
    one."""
    state = unpack_state(Gathered, read_checkpoint(folder).server)
    result = json.loads((folder / "result.json").read_bytes())
    least, known = int(result["parameters"]["min_count"]), dict(enumerate(names))
    called = {i: known.get(i, f"client {i}") for i in range(int(result["clients"]))}
    moved = read_parquet(folder / "ledger.parquet", ["client", "bytes_up", "bytes_down"]).to_pydict()
    sites = {i: _site(called[i], reported) for i, reported in state.reported.items()}
    for client, up, down in zip(*moved.values(), strict=True):
        if client in sites:
            sites[client].uplink_bytes += up
            sites[client].downlink_bytes += down
    hidden = [
        HiddenSum(tells, _named(state, tells, called), samples if samples >= least else None, columns)
        for tells, (samples, columns) in state.hidden(least).items()
    ]
    whole = SurveyFile(
        VERSION,
        least,
        list(dict.fromkeys(name for reported in state.reported.values() for name in reported.target)),
        list(sites.values()),
        hidden,
        absent=[called[i] for i in called if i not in sites],
        dp=result.get("dp") or "",
        uplink_bytes=result["uplink_bytes"],
        downlink_bytes=result["downlink_bytes"],
    )
    counted = [each for each in whole.sites if each.columns and all(each.name not in one.sites for one in hidden)]
    whole.left_out = [
        each.name
        for each in whole.sites
        if each.tells != "figures" and all(each.name not in one.sites for one in hidden)
    ]
    whole.small = [each.name for each in whole.sites if each.tells == "figures" and each.samples is None]
    if any(each.columns for each in whole.sites):
        there = {name for each in whole.sites for name in each.columns}
        there |= {name for reported in state.reported.values() for name in reported.ignored}
        asked = [name for key in ("target", "columns", "leave_out") for name in result.get(key) or ()]
        whole.unknown = [name for name in asked if name not in there]
    whole.pooled = pooled_columns([*(each.columns for each in counted), *(each.columns for each in hidden)])
    whole.quantiles = {name: read for name, of in whole.pooled.items() if (read := quantiles(of))}
    reported = {each.name: each.columns for each in whole.sites if each.columns}
    whole.drift = drift(reported)
    whole.common = [
        Common((called[i], called[j]), count if count >= least or not count else None)
        for (i, j), count in common(state.reported).items()
    ]
    whole.findings = [*findings(reported, whole.target, least), *map(_of_duplicates, filter(_is_some, whole.common))]
    return whole


def _is_some(common: Common) -> bool:
    return common.samples != 0


def _of_duplicates(common: Common) -> Finding:
    count = "some" if common.samples is None else f"{common.samples:,}"
    return Finding("duplicates", "", list(common.sites), f"{count} samples are at both {' and '.join(common.sites)}")


def write_survey_file(folder: Path, names: Sequence[str] = ()) -> SurveyFile:
    """Write survey.json of a survey's run folder, and return its content. Raises UserError as `survey_of`."""
    whole = survey_of(folder, names)
    with replacing(folder / NAME) as file:
        file.write(msgspec.json.format(msgspec.json.encode(whole), indent=1))
    return whole


def quantiles(figures: ColumnFigures) -> dict[str, float]:
    """The QUANTILES of a column by their shares, as far as its cells tell them."""
    found = {str(share): figures.quantile(share) for share in QUANTILES}
    return {share: value for share, value in found.items() if value is not None}


def _site(name: str, reported: Reported) -> SurveyedSite:
    return SurveyedSite(name, reported.tells, reported.samples, reported.figures())


def _named(state: Gathered, tells: str, called: Mapping[int, str]) -> list[str]:
    """The names of the sites that tell this."""
    return [called[i] for i, reported in state.reported.items() if reported.tells == tells]
