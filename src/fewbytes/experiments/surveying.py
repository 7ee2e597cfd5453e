"""The task of a survey: every site's data, read as they are."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fewbytes.base.errors import UserError, of_data, suggestion
from fewbytes.base.language import read_tokenizer
from fewbytes.core.problem import Id
from fewbytes.core.task import Task
from fewbytes.data.clients import Dataset, FederatedData
from fewbytes.data.federated import federate
from fewbytes.data.schema import Schema
from fewbytes.data.settings import Partition
from fewbytes.data.split import ClientData
from fewbytes.data.surveyed import Figures, Reading, SiteTerms, Surveyed, read_surveyed
from fewbytes.experiments.groups import DataSettings
from fewbytes.experiments.loading import place_of_client, schema_of_settings
from fewbytes.experiments.settings import Experiment
from fewbytes.methods.survey.figures import describe

TELL = ("figures", "labels", "sizes", "nothing")
"""What a site may tell."""
TermsOf = Callable[[Id], SiteTerms]
"""The terms of each client's site."""


def survey_task(experiment: Experiment, here: Sequence[Id] | None, terms: TermsOf) -> Task:
    """The data of the clients that are `here` (None: all), each by its site's `terms`. Raises UserError."""
    how, partition = experiment.data, experiment.partition
    reading = _reading(how)
    if partition.partition != "local":
        data = _split(read_surveyed(how.dataset, reading, SiteTerms()), partition, experiment.model.seed, terms)
    else:
        data = _local(how, reading, partition.clients, here, terms)
    if here is None:
        _check_named(reading.schema, data)
    model = functools.partial(nn.Linear, 1, 1)  # nothing is trained: both ends only agree on it
    return Task.on(data, model, seed=experiment.model.seed, sample=torch.zeros(1, 1))


def _check_named(schema: Schema, data: FederatedData) -> None:
    """Raises UserError unless each column that is named is one of a site's."""
    every: list[Figures] = [client.train.about for client in data.clients]  # type: ignore[attr-defined]
    there = list(dict.fromkeys(name for each in every for name in (*each.columns, *each.ignored)))
    for name in (*schema.target, *schema.columns, *schema.leave_out):
        if name not in there:
            where = "--leave-out" if name in schema.leave_out else "--target or --columns"
            raise UserError(f"no site has a column {name!r}{suggestion(name, there)}: correct {where}")


def described_like(how: DataSettings, place: str) -> str:
    """The columns of a table like the sites', as the setting `like` of a survey: JSON. Raises UserError."""
    about: Figures = read_surveyed(place, _reading(how), SiteTerms()).train.about  # type: ignore[attr-defined]
    return msgspec.json.encode({name: describe(column, 1) for name, column in about.columns.items()}).decode()


def _reading(how: DataSettings) -> Reading:
    schema = schema_of_settings(dataclasses.replace(how, schema=None))
    if how.tokenizer is None:
        return Reading(schema, how.text, image_size=how.image_size)
    tokenizer = read_tokenizer(how.tokenizer)

    def lengths(texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    return Reading(schema, how.text, lengths, "tokens", how.image_size)


def _split(dataset: Dataset, partition: Partition, seed: int, terms: TermsOf) -> FederatedData:
    """The rows that each client of a run would have."""
    data = federate(dataset, partition, seed)
    whole = dataset.train.about  # type: ignore[attr-defined]
    clients = [
        _described(whole, terms(i), client.train.rows, client.test.rows) for i, client in enumerate(data.clients)
    ]
    return _together(clients, data.presence)


def _described(about: Figures, terms: SiteTerms, *rows: NDArray[np.int64] | None) -> ClientData:
    """Training and test samples with these rows, without labels."""
    return ClientData(*(Surveyed(about, torch.zeros(about.rows, dtype=torch.int64), terms, each) for each in rows))


def _together(clients: Sequence[ClientData], presence: Any = None) -> FederatedData:
    nothing = _described(Figures({}, 0), SiteTerms(), None, None).train
    return FederatedData(tuple(clients), nothing, ("all",), presence=presence, groups=("all",))


def _local(how: DataSettings, reading: Reading, count: int, here: Sequence[Id] | None, terms: TermsOf) -> FederatedData:
    """Each client's own data, if they are here."""
    clients = [_described(Figures({}, 0), SiteTerms(), None, None)] * count
    for i in range(count) if here is None else here:
        place = place_of_client(how, i, count, here is not None)
        with of_data():
            data = read_surveyed(place, reading, terms(i))
        whole = data.train.about  # type: ignore[attr-defined]
        if not whole.rows:
            raise UserError(f"{place} has no samples: put data there", public="it has no samples")
        clients[i] = _described(whole, terms(i), data.train.rows, data.test.rows)
    return _together(clients)


def terms_of_node(config: Mapping[str, Any], hidden: bool) -> SiteTerms:
    """What a node with this configuration reports. `hidden`: its policy allows replies only in sums. Raises
    UserError."""
    tell, least, salt = config.get("tell", "sizes"), config.get("min-count", 10), config.get("survey-salt", "")
    if isinstance(least, bool) or not isinstance(least, int) or least < 1:
        raise UserError(f"min-count is a whole number of at least 1 in this node's configuration, not {least!r}")
    if tell not in TELL:
        raise UserError(f"tell is one of {', '.join(TELL)} in this node's configuration, not {tell!r}")
    return SiteTerms("nothing" if hidden else tell, least, str(salt))
