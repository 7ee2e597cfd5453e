"""Errors' options of the command line, as arguments in Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from fewbytes.base.errors import UserError

LISTS = ("leave-out", "columns", "missing-marks", "categories")  # options of several values
VALUES = (*LISTS, "missing", "limits", "decimal", "date-order", "group", "target")  # options followed by their values
OPTION = re.compile(r"--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?:[ =]('[^']*'|[^\s;:)]*[^\s,;:.)]))?")
NO_VALUE = {"names", "sets", "says", "is", "and", "or", "instead", "if"}


@contextmanager
def in_python(of_tables: str = "{}") -> Iterator[None]:
    """UserErrors raised inside name arguments of a Python call where they name options of the command line.
    `of_tables`: as in `python_words`."""
    try:
        yield
    except UserError as error:
        error.args = (python_words(str(error), of_tables), *error.args[1:])
        raise


def python_words(text: str, of_tables: str = "{}") -> str:
    """An error's text with options of the command line as arguments in Python. `of_tables`: how the call takes those
    that are followed by values, such as `schema=Schema({})`.

    >>> from fewbytes.base.python_words import python_words
    >>> python_words("fill it in, or run with --missing drop (--leave-out 'my lab', --keep-checkpoints sets how many)")
    "fill it in, or pass missing='drop' (leave_out=['my lab'], keep_checkpoints sets how many)"
    """

    def argument(found: re.Match[str]) -> str:
        option, value = found[1], found[2]
        name = option.replace("-", "_")
        if value is None or option not in VALUES or value in NO_VALUE:
            return name + found[0][2 + len(option) :]
        words = re.split(r"[,|]", value.strip("'"))
        if option in LISTS or (option == "target" and of_tables != "{}"):
            return of_tables.format(f"{name}={words!r}")
        return of_tables.format(f"{name}={' or '.join(map(repr, words))}")

    return OPTION.sub(argument, text.replace("run with --", "pass --"))
