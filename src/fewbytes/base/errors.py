"""Errors that users can fix, each with a clear one-line message."""

from __future__ import annotations

import difflib
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class FewbytesError(Exception):
    """Base of all errors this package raises on purpose; the text is one line for the user.

    >>> import fewbytes as fb
    >>> try:
    ...     fb.Policy(exclude="all")
    ... except fb.FewbytesError as error:
    ...     print(error)
    exclude takes clients' numbers with commas, like 3,7, not 'all'
    """


class UserError(FewbytesError):
    """The user's input was wrong: an option, a file, a data set. The command line exits with code 2.

    `public`: the text without anything from the user's data, which a node sends to its server; None: no such text.

    >>> import fewbytes as fb
    >>> fb.FedAvg(lr=-1)
    Traceback (most recent call last):
    fewbytes.base.errors.UserError: lr must be above 0, not -1
    """

    def __init__(self, text: str, public: str | None = None) -> None:
        super().__init__(text)
        self.public = public


@contextmanager
def of_data() -> Iterator[None]:
    """Errors raised inside, while a site's data are read, may name files, rows and values, whatever their class."""
    try:
        yield
    except Exception as error:
        if getattr(error, "public", None) is None:
            kind = "" if isinstance(error, FewbytesError) else f" ({type(error).__name__})"
            error.public = f"its data cannot be used, and its own log says why{kind}"  # type: ignore[attr-defined]
        raise


def public_text(error: BaseException) -> str:
    """The text about a site's error that the server receives: `public` if set, or the text of our own error unless
    raised while data are read (`of_data`). For all others the class, and where in the user's code it was raised: their
    text may quote data."""
    if (public := getattr(error, "public", None)) is not None:
        return str(public)
    if isinstance(error, UserError):
        return str(error)
    what = str(error) if isinstance(error, FewbytesError) else f"{type(error).__name__}, its own log says more"
    where = raised_at(error, own_code=True)
    return f"{what} ({where})" if where else what


class LikelyMistake(UserWarning):
    """Code that runs, but probably not as its author intended."""


class MethodError(FewbytesError):
    """A method broke the contract of `fewbytes.core.method`, or one of its handlers raised an error.

    >>> import fewbytes as fb
    >>> fb.Mean()()
    Traceback (most recent call last):
    fewbytes.base.errors.MethodError: nothing to average: no client replied
    """


class FrameError(FewbytesError):
    """Bytes that are not a well-formed frame for this receiver: damaged, hostile or of another layout.

    `code` names the cause in one word: `truncated`, `magic`, `version`, `checksum`, `length`, `header`,
    `type`, `layout`, `base`, `coding`, `padding`, `values`.

    >>> import fewbytes as fb
    >>> try:
    ...     fb.unpack(fb.Dense, b"no frame")
    ... except fb.FrameError as error:
    ...     print(error.code)
    magic
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{text} [{code}]")
        self.code = code


def listed(names: Sequence[str], most: int = 20) -> str:
    """Names for an error text, at most `most` of them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def suggestion(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the known name closest to a misspelt one, or an empty text."""
    spelt = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name.casefold(), list(spelt), n=1)
    return f" (did you mean {spelt[close[0]]!r}?)" if close else ""


def named(value: object) -> str:
    """A value of the wrong kind for an error text: texts and numbers as they are, of all else the type."""
    return repr(value) if value is None or isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def one_line(error: Exception, most: int = 100_000) -> str:
    """An error from foreign code in one line of whole words, at most `most` characters."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", most, placeholder=" …")


def error_text(error: BaseException) -> str:
    """The text of an error from foreign code, in one line, with Python's suggestion for a misspelt name."""
    lines = list(traceback.TracebackException.from_exception(error).format_exception_only())
    return " ".join(lines[-1 - len(getattr(error, "__notes__", ())) :][:1]).strip().replace("\n", " ")


def raised_at(error: BaseException, own_code: bool = False) -> str:
    """Where an error was raised: in the user's code if the traceback passes there, else in ours rather than a
    library's; with `own_code`, an empty text if not in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    mine = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename[:1] != "<"]
    own = [frame for frame in mine if not frame.filename.startswith(ours)]
    for place in (own if own_code else own or mine or frames)[-1:]:
        return f"{Path(place.filename).name}, line {place.lineno}"
    return ""


def with_article(kind: type | str) -> str:
    """A class name with its article, for error texts."""
    name = kind if isinstance(kind, str) else kind.__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def returned(value: object) -> str:
    """The value that a function returned instead of the expected one, for error texts."""
    return "nothing (is `return` missing?)" if value is None else with_article(type(value))


def cleaned(text: str | None, most: int = 300) -> str:
    """Untrusted text for one line of output, such as a message from a client's node: at most `most` characters, without
    characters that control a terminal, hide or reverse the text."""
    printable = "".join(c if c.isprintable() else " " for c in (text or "")[: 4 * most])
    return " ".join(printable.split())[:most]


def visible(text: str) -> str:
    """Untrusted text of any length, without characters that control a terminal, hide or reverse the text; keeps its
    lines."""
    return text if text.isprintable() else "".join(c for c in text if c.isprintable() or c in "\n\t\u00a0\u3000")


def import_failed(error: Exception, module: str) -> str:
    """Why importing a user's module by name, and reading an attribute of it, failed, in one line."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    of_module = missing is None or not f"{module}.".startswith(f"{missing}.")  # else another module is missing
    return one_line(error) + ("" if of_module else "; is its folder on PYTHONPATH?")
