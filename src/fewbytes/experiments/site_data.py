"""Reads a site's own data before any run, as its node reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError, one_line
from fewbytes.base.named import only_allowed
from fewbytes.data.surveyed import Reading, SiteTerms, read_surveyed
from fewbytes.experiments.config_file import read_experiment
from fewbytes.experiments.loading import load
from fewbytes.experiments.settings import make_experiment
from fewbytes.federation.preflight import Unasked


def read_site_data(place: str, node: Mapping[str, Any], config: Path | None) -> str:
    """Words about the data at a place, which a node with this configuration (as of its node.toml) reads.

    `config`: the config.toml of a run, whose settings of data are used (None: the defaults). Raises UserError if they
    cannot be read, or if there is no training sample; Unasked if only a run's settings are missing, as of the column to
    predict.
    """
    settings = {"method": "fedavg"} if config is None else read_experiment(config)
    settings |= {"partition": "local", "clients": 1, "client_data": place, "newcomers": 0}
    settings.pop("arrival", None)
    given = str(node.get("allow") or os.environ.get("FEWBYTES_ALLOW", ""))
    allowed = [*(name.strip() for name in given.split(",")), place]
    try:
        with only_allowed(*allowed, anywhere=False):
            experiment = make_experiment(settings)
            mine = load(experiment.data, experiment.partition, experiment.model, (0,)).federated.clients[0]
    except (UserError, OSError) as error:
        why = str(error) if isinstance(error, UserError) else one_line(error)
        if config is None and (rows := _rows(place, allowed)):
            there = f"{place} has {rows} readable samples, but by default: {why}"
            raise Unasked(f"as a run reads it, which --config CONFIG says: {there}") from None
        raise UserError(f"{place} cannot be read: {why}") from None
    if not len(mine.train):
        raise UserError(f"{place} has no training samples: put data there")
    return f"{place} has {len(mine.train)} training and {len(mine.test)} test samples"


def _rows(place: str, allowed: Sequence[str]) -> int:
    """How many samples are there, whatever a run would learn of them; 0 if they cannot be read at all."""
    with suppress(UserError, OSError), only_allowed(*allowed, anywhere=False):
        found = read_surveyed(place, Reading(), SiteTerms())
        return len(found.train) + len(found.test)
    return 0
