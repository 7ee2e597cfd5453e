"""The errors a user can mend, each said in one clear line."""

from __future__ import annotations

import difflib
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class FewbytesError(Exception):
    """Base of every error this package raises on purpose; its text is one line for the user.

    >>> import fewbytes as fb
    >>> try:
    ...     fb.Policy(exclude="all")
    ... except fb.FewbytesError as error:
    ...     print(error)
    exclude takes clients' numbers with commas, like 3,7, not 'all'
    """


class UserError(FewbytesError):
    """The user's input was wrong: an option, a file, a data set. The command line exits with code 2.

    `public`: the same without what is in the user's data, as a node tells it to its server; None: nothing is.

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
    """What fails within, as a site's data are read, holds names of files, rows and values, whoever raises it."""
    try:
        yield
    except Exception as error:
        if getattr(error, "public", None) is None:
            kind = "" if isinstance(error, FewbytesError) else f" ({type(error).__name__})"
            error.public = f"its data cannot be used, and its own log says why{kind}"  # type: ignore[attr-defined]
        raise


def public_text(error: BaseException) -> str:
    """What a server is told of an error at a site: the words that were chosen for it (`public`), those of our own
    errors, which hold nothing of data that are not read (`of_data`), and of all others the class and where in one's own
    code they were raised, as their words may quote what they failed at."""
    if (public := getattr(error, "public", None)) is not None:
        return str(public)
    if isinstance(error, UserError):
        return str(error)
    what = str(error) if isinstance(error, FewbytesError) else f"{type(error).__name__}, its own log says more"
    where = raised_at(error, own_code=True)
    return f"{what} ({where})" if where else what


class LikelyMistake(UserWarning):
    """Something that runs, but hardly as its author meant."""


class MethodError(FewbytesError):
    """A method broke the contract of `fewbytes.core.method`, or one of its handlers raised.

    >>> import fewbytes as fb
    >>> fb.Mean()()
    Traceback (most recent call last):
    fewbytes.base.errors.MethodError: a mean of nothing: no client replied
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
    truncated
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{text} [{code}]")
        self.code = code


def listed(names: Sequence[str], most: int = 20) -> str:
    """Names for an error, not too many."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def suggestion(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the known name closest to a misspelt one, or nothing."""
    spelt = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name.casefold(), list(spelt), n=1)
    return f" (did you mean {spelt[close[0]]!r}?)" if close else ""


def named(value: object) -> str:
    """A value of the wrong kind, briefly: a text or a number itself, of all else the type."""
    return repr(value) if value is None or isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def one_line(error: Exception, most: int = 100_000) -> str:
    """What somebody else's code raised, in one line of whole words and so many characters at most."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", most, placeholder=" …")


def error_text(error: BaseException) -> str:
    """What an error of somebody's code says, in one line, with Python's guess of what was meant."""
    lines = list(traceback.TracebackException.from_exception(error).format_exception_only())
    return " ".join(lines[-1 - len(getattr(error, "__notes__", ())) :][:1]).strip().replace("\n", " ")


def raised_at(error: BaseException, own_code: bool = False) -> str:
    """Where an error was raised: in the user's own code, if it passed there, else in ours rather than a library's, or,
    if only `own_code` is asked for, nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    mine = [frame for frame in frames if "site-packages" not in frame.filename and frame.filename[:1] != "<"]
    own = [frame for frame in mine if not frame.filename.startswith(ours)]
    for place in (own if own_code else own or mine or frames)[-1:]:
        return f"{Path(place.filename).name}, line {place.lineno}"
    return ""


def with_article(kind: type | str) -> str:
    """A class with its article, as errors name it."""
    name = kind if isinstance(kind, str) else kind.__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"


def returned(value: object) -> str:
    """What a function gave back that should have given something else."""
    return "nothing (is `return` missing?)" if value is None else with_article(type(value))


def cleaned(text: str | None, most: int = 300) -> str:
    """Somebody else's words for a line of ours, such as what a client's node says: at most so many characters, and
    none that steers a terminal, hides or turns the text around."""
    printable = "".join(c if c.isprintable() else " " for c in (text or "")[: 4 * most])
    return " ".join(printable.split())[:most]


def visible(text: str) -> str:
    """Text that may hold somebody else's words, of any length, without characters that steer a terminal, hide or turn
    the text around; its lines stay."""
    return text if text.isprintable() else "".join(c for c in text if c.isprintable() or c in "\n\t\u00a0\u3000")


def import_failed(error: Exception, module: str) -> str:
    """What came of importing a module of the user's by its name and taking something from it, in one line."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    of_module = missing is None or not f"{module}.".startswith(f"{missing}.")  # then it lacks something else
    return one_line(error) + ("" if of_module else "; is its folder on PYTHONPATH?")
