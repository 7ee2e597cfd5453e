"""Data sets from your own function: `package.module:function`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fewbytes.base.calls import takes_argument
from fewbytes.base.errors import UserError, one_line
from fewbytes.base.named import imported
from fewbytes.data.clients import Dataset
from fewbytes.data.split import Split, check_finite, classes_in, widest

NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_function(name: str) -> bool:
    """Whether `name` is a function in a module."""
    return NAME.fullmatch(name) is not None and not name.startswith("coco:")


def own_data(name: str, client: int | None = None, classes: Sequence[str] | None = None) -> Dataset:
    """Call the function `package.module:function`, with the client's number if it takes an argument.

    It returns a Dataset, or (training samples, test samples), each as for `Split.of`: an (x, y) pair, or a map-style
    data set with its own transforms. The class names are its `classes`, as in torchvision's data sets; else labels are
    numbers of `classes`, the run's. Raises UserError, in one line, for every failure.
    """
    try:
        function = imported(name)
    except UserError:
        raise
    except Exception as error:  # importing runs the user's code
        text = f"data {name!r} cannot be imported: {one_line(error)}; is its folder on PYTHONPATH?"
        raise UserError(text) from error
    try:
        returned = function(client) if takes_argument(function) else function()
    except Exception as error:
        raise UserError(f"data {name!r} cannot be made: {one_line(error)}") from error
    if isinstance(returned, Dataset):
        return returned
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise UserError(
            f"data {name!r} returned a {type(returned).__name__}: return a Dataset, or (training samples, test samples)"
        )
    try:
        train, test = (Split.of(each) for each in returned)
        for split, whose in ((train, "training samples"), (test, "test samples")):
            check_finite(split, whose)
    except UserError as error:
        raise UserError(f"data {name!r}: {error}") from None
    if not len(train):
        raise UserError(f"data {name!r} returned no training sample: return at least one")
    called = getattr(returned[0], "classes", None)
    groups = None if train.learns == "classes" else ("samples",)
    return Dataset(name, train, test, _classes(name, [train, test], called or classes), groups)


def _classes(name: str, splits: list[Split], named: Sequence[Any] | None) -> tuple[str, ...]:
    """The names of the models' outputs. Raises UserError for a label beyond those that are named."""
    if splits[0].learns != "classes":
        return tuple(map(str, named or range(widest(splits))))
    count = classes_in(splits)
    if named is None:
        return tuple(map(str, range(count)))
    if count > len(named):
        raise UserError(
            f"data {name!r} has labels up to {count - 1}, and there are {len(named)} classes, "
            f"{', '.join(map(str, named))}: number labels from 0 in this order"
        )
    return tuple(map(str, named))
