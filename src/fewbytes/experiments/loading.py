"""Loads an experiment's data: a dataset split among clients, or each client's own; and what all nodes must agree on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from fewbytes.base.errors import UserError, of_data
from fewbytes.base.language import read_tokenizer, tokenizer_digest
from fewbytes.core.problem import Id
from fewbytes.data import (
    Dataset,
    FederatedData,
    Partition,
    Schema,
    client_folders,
    federate,
    federate_local,
    holds_table,
    holds_text,
    is_function,
    load_text,
    masks_of_boxes,
    own_data,
    with_public,
)
from fewbytes.data.channels import channel_figures
from fewbytes.data.datasets import HOST, Splitting, load_dataset
from fewbytes.data.natural import words
from fewbytes.data.schema import USUAL_MARKS
from fewbytes.data.settings import FOLDERS, USED_BY
from fewbytes.data.split import Split, ungrouped
from fewbytes.data.table_files import table_suffix
from fewbytes.data.tables import empty_table
from fewbytes.experiments.groups import DECLARED, DataSettings, ModelSettings
from fewbytes.models.hugging_face import PREFIX
from fewbytes.models.normalisation import Normalisation

TOKENIZER = "tokenizer (give every node the server's folder)"
"""The key of its digest in what servers and nodes must agree on."""
OF_TABLES = (
    "target", "missing", "leave_out", "columns", "categories", "missing_marks", "limits", "decimal", "date_order",
    "encoding", "separator", "sheet", "group",
)  # fmt: skip
"""The settings for reading tables."""


@dataclass(frozen=True)
class Loaded:
    """An experiment's data, and what they determined."""

    federated: FederatedData
    agreed: Mapping[str, str]
    """What servers and nodes must agree on."""
    data: DataSettings
    """The settings, with class names and the meaning of columns."""
    partition: Partition
    """The settings, with the number of clients."""
    model: ModelSettings
    """The settings, with the statistics of a normalisation."""
    tokenizer: Any = None
    """Of texts."""
    notes: tuple[str, ...] = ()
    """Findings while reading the data, one line each."""


def load(data: DataSettings, partition: Partition, model: ModelSettings, here: Sequence[Id] | None) -> Loaded:
    """Load the data that the settings name. `here`: with a local partition, the clients whose data are on this
    machine; None: all. Raises UserError."""
    if partition.partition == "local":
        return _local(Reader(data, model), partition, here)
    return _split(Reader(data, model, partition), partition)


def _split(reader: Reader, partition: Partition) -> Loaded:
    """The dataset split among clients; servers and nodes all split it."""
    how, model = reader.asked, reader.model
    if how.client_data is not None or how.class_names is not None:
        name = "class_names" if how.client_data is None else "--client-data"
        raise UserError(f"{name} is for clients with their own data: add --partition local")
    of = {"flwr": "flwr:<Partitioner>", "column": "column:<name>"}
    kind = of.get(partition.partition.partition(":")[0], partition.partition)
    for key, users in USED_BY.items():
        if kind not in users and getattr(partition, key) != DECLARED[key].default:
            raise UserError(
                f"{key} is for partition {' and '.join(users)}, and {kind} does not use it: leave one of them out"
            )
    dataset, public = reader.part(reader.dataset(how.dataset)), None
    kept = _with_schema(how if dataset.schema is None else reader.settings, dataset)
    # the key is part of a run's fingerprint: with another wording, earlier runs could not be resumed
    agreed = {"data set (split among the clients; --partition local leaves each node its own)": _words(dataset)}
    if partition.test != "own-share":
        agreed["test"] = partition.test
    if how.public is not None:
        dataset, public = with_public(dataset, str(how.public), model.seed, how.image_size)
    if _by_data(model) and dataset.learns != "boxes":
        figures = Normalisation.of(*channel_figures(dataset.train))
        model = dataclasses.replace(model, normalise=figures)  # these are kept: no need to compute again
    federated = dataclasses.replace(federate(dataset, partition, model.seed), public=public)
    for key in ("label_noise", "shift"):
        if (value := getattr(partition, key)) is not None:
            agreed[key] = str(value)
    if (column := partition.column) is not None:
        left = len(dataset.test) - sum(len(client.test) for client in federated.clients)
        reader.note(words(federated.names, column, left if partition.test == "own-share" else 0))
        partition = dataclasses.replace(partition, clients=len(federated.clients))
    return reader.loaded(federated, agreed, (kept, partition, model))


def _without_column(how: DataSettings, column: str | None) -> DataSettings:
    """The settings, by which a table's column that names the clients is not a feature, unless `columns` names it."""
    if not column or how.schema is not None or how.text is not None or column in (how.columns or ()):
        return how
    if column in (how.leave_out or ()) or column == how.group:
        return how
    return dataclasses.replace(how, leave_out=[*(how.leave_out or ()), column])


def _local(reader: Reader, partition: Partition, here: Sequence[Id] | None) -> Loaded:
    """Each client's own dataset, if it is here."""
    how, model, count = reader.settings, reader.model, partition.clients
    for key, each in Partition.declared().items():
        if key not in ("partition", "clients") and getattr(partition, each.name) != each.default:
            raise UserError(f"{key} sets how a dataset is split, and partition local splits none: leave it out")
    if _by_data(model):
        raise UserError(
            "normalise data needs all clients' samples, which partition local does not collect: give imagenet or "
            "MEAN/STD"
        )
    if str(how.public or "").isdecimal():
        raise UserError("partition local holds out no samples: give a dataset of the server's as public")
    like = reader.client(place_of_client(how, here[0], count, True), here[0], how) if here else reader.server()
    names = list(like.classes) if how.class_names is None else how.class_names
    kept = _with_schema(how, like)  # the clients' tables have the same
    if like.learns != "tokens":  # their names come from the tokenizer
        kept = dataclasses.replace(kept, class_names=names)
    mine = {here[0]: like} if here else {}
    for client in range(count) if here is None else here[1:]:
        mine[client] = reader.client(place_of_client(how, client, count, here is not None), client, kept)
    test = like.test.take([]) if here else like.numbered(names).test
    federated = federate_local([mine.get(i) for i in range(count)], test, names, like.groups)
    if how.public is not None and not here:
        public = with_public(like, str(how.public), model.seed, how.image_size)[1]
        federated = dataclasses.replace(federated, public=public)
    if not here and len(called := site_names_of(how)) == count:
        federated = dataclasses.replace(federated, names=called)
    agreed = {} if like.learns == "tokens" else {"classes": json.dumps(names)}
    agreed |= {"shape of a sample": str(test.shape)}
    agreed |= {} if like.schema is None else {"columns": like.schema.text()}
    return reader.loaded(federated, agreed, (kept, partition, model))


class Reader:
    """Reads datasets as the settings say, and keeps the tokenizer and the notes of all that it read. `partition`: how a
    dataset will be split. A column that names the clients is not a feature."""

    def __init__(self, settings: DataSettings, model: ModelSettings, partition: Partition | None = None) -> None:
        column = None if partition is None else partition.column
        self.asked, self.settings, self.model = settings, _without_column(settings, column), model
        plain = None if partition is None else dataclasses.replace(partition, shift=None)
        check = None if plain is None else lambda labels: federate(self._used(labels), plain, model.seed)
        self._by = column or None  # texts' groups
        self._splitting = Splitting(column != FOLDERS, check)  # each of the folders is for training and for testing
        self._tokenizer: Any = None
        self._notes: list[str] = []

    def loaded(
        self,
        federated: FederatedData,
        agreed: Mapping[str, str],
        settings: tuple[DataSettings, Partition, ModelSettings],
    ) -> Loaded:
        """What was read, and what servers and nodes with text must agree on in addition."""
        of_text = {} if self._tokenizer is None else {TOKENIZER: tokenizer_digest(self._tokenizer)}
        return Loaded(federated, of_text | dict(agreed), *settings, self._tokenizer, tuple(self._notes))

    def note(self, text: str) -> None:
        """Note a finding."""
        self._notes.append(text)

    def client(self, place: str, client: Id, settings: DataSettings) -> Dataset:
        """A client's own dataset, with the class names and columns of these settings."""
        with of_data():
            if is_function(place):
                own = own_data(place, client, settings.class_names)
                return self.part(dataclasses.replace(own, notes=tuple(f"client {client}: {n}" for n in own.notes)))
            return _in_one_group(self.part(self.dataset(place, schema=schema_of_settings(settings))))

    def server(self) -> Dataset:
        """The server's own dataset, of which only the test samples are used; empty if a survey took its place."""
        if self.settings.schema is not None and self.settings.dataset == DECLARED["dataset"].default:
            return empty_table(schema_of_settings(self.settings), self.settings.class_names or ())
        if self.settings.schema is None and self.settings.sample_shape is not None:
            return no_samples(self.settings.sample_shape, self.settings.class_names or ())
        try:
            return _in_one_group(self.part(self.dataset(self.settings.dataset, only_test=True)))
        except UserError as error:
            raise UserError(
                f"{error} (with --partition local, --dataset is the server's test data: a table, or a folder with a "
                "test set)"
            ) from None

    def part(self, dataset: Dataset) -> Dataset:
        """The part of it that is used."""
        self._notes += [f"{dataset.name}: {note}" for note in dataset.notes]
        return self._used(dataset)

    def _used(self, dataset: Dataset) -> Dataset:
        return dataset.part(self.settings.part, self.model.seed) if self.settings.part < 1 else dataset

    def dataset(self, name: str, only_test: bool = False, schema: Schema | None = None) -> Dataset:
        """The dataset of that name, with boxes converted to masks if requested."""
        how, schema = self.settings, schema or schema_of_settings(self.settings)
        if how.text is not None or (name != "digits" and not is_function(name) and holds_text(name)):
            if len(how.target or ()) > 1:
                raise UserError("a text has one class: give one column as target")
            label = how.target[0] if how.target else None
            return load_text(name, self._read_tokenizer(), how.length, how.text, label, only_test, schema, self._by)
        models = [each for each in (self.model.model or "").split("+") if each.startswith(PREFIX)]
        if models and holds_table(name):
            raise UserError(
                f"{name} is a table, and {models[0]} reads text: give the column with the text (--text COLUMN)"
            )
        dataset = load_dataset(name, how.image_size, only_test, schema, how.uncertain, self._splitting)
        if how.uncertain != "refuse" and not dataset.listed:
            raise UserError(f"uncertain is for images with a table of labels, and {name} has none: leave it out")
        if how.masks and dataset.learns != "boxes":
            raise UserError(f"masks are made from boxes, and {name} has none: leave it out")
        return masks_of_boxes(dataset) if how.masks else dataset

    def _read_tokenizer(self) -> Any:
        """The tokenizer. Raises UserError if no setting names one."""
        model = self.model.model or ""
        place = self.settings.tokenizer or (model.removeprefix(PREFIX) if model.startswith(PREFIX) else None)
        if place is None:
            raise UserError(
                f"{self.settings.dataset} holds text, and no tokenizer is given: use --tokenizer, or an hf: model"
            )
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(place)
        return self._tokenizer


def no_samples(shape: Sequence[int], classes: Sequence[str]) -> Dataset:
    """A dataset without samples, for a server without data. `shape`: of a sample."""
    nothing = Split(torch.zeros(0, *shape), torch.zeros(0, dtype=torch.int64))
    return Dataset("no data", nothing, nothing, tuple(classes))


def schema_of_settings(how: DataSettings) -> Schema:
    """The meaning of tables' columns, as far as it is known yet."""
    if how.schema is None:
        separator = {"tab": "\t", "\\t": "\t"}.get(how.separator or "", how.separator or "")
        if len(separator) > 1:
            raise UserError(f"separator must be one character, or tab, not {separator!r}")
        return Schema(
            target=tuple(how.target or ()),
            missing=how.missing,
            leave_out=tuple(how.leave_out or ()),
            columns=tuple(how.columns or ()),
            categories=dict.fromkeys(how.categories or (), ()),
            missing_marks=USUAL_MARKS if how.missing_marks is None else tuple(how.missing_marks),
            limits=how.limits,
            decimal=how.decimal,
            date_order=how.date_order,
            encoding=how.encoding or "",
            separator=separator,
            sheet=how.sheet or "",
            group=how.group or "",
        )
    try:
        return msgspec.convert(how.schema, Schema)
    except msgspec.ValidationError as error:
        raise UserError(f"schema: {error}") from None


def _with_schema(how: DataSettings, dataset: Dataset) -> DataSettings:
    """The settings with the meaning of a table's columns, for clients' tables and for resumed runs.

    Raises UserError for settings of tables if the dataset is none.
    """
    if dataset.schema is not None:
        return dataclasses.replace(how, schema=msgspec.to_builtins(dataset.schema))
    of_text: tuple[str, ...] = ("target", "missing", "encoding", "separator", "sheet") if how.text is not None else ()
    if dataset.listed:
        of_text = ("target", "group", "missing_marks", "encoding", "separator", "sheet")
    for key in OF_TABLES:
        if key not in of_text and getattr(how, key) != DECLARED[key].default:
            raise UserError(f"{key} is for tables, and {dataset.name} is not a table: leave it out")
    return how


def site_names_of(how: DataSettings) -> tuple[str, ...]:
    """The names of clients with their own data, those of their folders or tables, if these are here; empty for clients
    of a function."""
    if how.client_data is None or is_function(how.client_data):
        return ()
    try:
        return site_names(client_folders(how.client_data))
    except UserError:  # a server need not have them
        return ()


def site_names(places: Sequence[Path]) -> tuple[str, ...]:
    """The names of folders, and of files without their suffix, unless two would be equal."""
    short = tuple(
        place.name if place.is_dir() else place.name.removesuffix(table_suffix(place) or place.suffix)
        for place in places
    )
    return short if len(set(short)) == len(short) else tuple(place.name for place in places)


def place_of_client(how: DataSettings, client: Id, count: int, alone: bool) -> str:
    """The place of a client's own dataset; `alone`: other clients' are on other machines."""
    place = how.client_data
    if place is None and alone:
        return _like_the_servers(how.dataset)
    if place is None:
        raise UserError("partition local needs --client-data, a folder with one folder or table per client")
    if is_function(place):
        return place
    folders = client_folders(place)
    if alone and len(folders) == 1:
        return str(folders[0])
    if len(folders) != count:
        held = f"holds data of {len(folders)} clients, not {count}"
        raise UserError(f"--client-data: {place} {held}", public=f"--client-data {held}")
    return str(folders[client])


def _like_the_servers(name: str) -> str:
    """The default place of a node's data: the folder with the name of the server's dataset.

    Raises UserError for data that may be the server's own, such as a table that exists on both.
    """
    if name == "digits" or table_suffix(Path(name)):
        raise UserError(f"{name} is the server's test data, not this node's: {HOST}")
    return name


def _by_data(model: ModelSettings) -> bool:
    """Whether samples are normalised by their own statistics."""
    return model.normalise is not None and model.normalise.of_data


def _in_one_group(dataset: Dataset) -> Dataset:
    """A dataset of texts in a single group: each client has its own documents, which are not split."""
    if dataset.learns != "tokens":
        return dataset
    return dataclasses.replace(dataset, train=ungrouped(dataset.train), test=ungrouped(dataset.test), groups=None)


def _words(dataset: Dataset) -> str:
    """A description of a dataset, which differs if labels do."""
    digest = hashlib.sha256("\n".join(dataset.classes).encode())
    for split in (dataset.train, dataset.test):
        digest.update(split.labels.numpy().tobytes())
    sizes = f"{len(dataset.train)} training and {len(dataset.test)} test samples of {len(dataset.classes)} classes"
    return f"{sizes}, labels {digest.hexdigest()[:8]}"
