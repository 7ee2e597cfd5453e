"""How commands end: exit codes, and errors as one line."""

from __future__ import annotations

import errno
import io
import itertools
import os
import sys
import warnings
from collections.abc import Callable

import typer
from rich.text import Text

from fewbytes.base.errors import FewbytesError, LikelyMistake, UserError, error_text, raised_at, visible
from fewbytes.base.named import look_in
from fewbytes.cli.options import option_words
from fewbytes.experiments.display import console
from fewbytes.experiments.groups import GROUPS


def _help() -> str:
    from fewbytes.cli.brief import FIRST

    return "--help-all" if sys.argv[1:2] and sys.argv[1] in FIRST else "--help"


def _debug() -> str:
    return "" if os.environ.get("FEWBYTES_DEBUG") else "FEWBYTES_DEBUG=1 shows the traceback"


def ending(command: Callable[[], object]) -> None:
    """Run a command and exit. Exit codes: 0 done, 2 the user's input was wrong, 1 anything else, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # some locales lack characters
    plain = warnings.formatwarning
    warnings.formatwarning = lambda text, kind, *of, **how: visible(
        f"note: {text}\n" if issubclass(kind, LikelyMistake) else plain(text, kind, *of, **how)
    )
    look_in(os.getcwd())
    try:
        returned = command()
        code = returned if isinstance(returned, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except typer.Exit as error:
        code = error.exit_code
    except UserError as error:
        code = _fail(option_words(str(error), GROUPS.values()), 2)
    except OSError as error:
        users = errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR  # what the user can fix
        where = f": {error.filename}" if error.filename else ""
        advice = "; free some space, then resume the run with --resume" if error.errno == errno.ENOSPC else ""
        code = _fail(f"{error.strerror or error}{where}{advice}", 2 if error.errno in users else 1)
    except FewbytesError as error:
        more = f" ({_debug()})" if getattr(error, "__notes__", None) and _debug() else ""  # a handler's own error
        code = _fail(f"{error}{more}", 1)
    except Exception as error:
        message = getattr(error, "format_message", None)  # a usage error of the command line's library
        if message is not None:
            code = _fail(_parameter(error) or f"{message()} ({_help()} lists the options)", 2)
        else:
            who = (getattr(error, "__notes__", None) or ["unexpected"])[-1]  # a method's server half, in a round
            where = "; ".join(filter(None, (raised_at(error, own_code=who != "unexpected"), _debug())))
            code = _fail(f"{who}: {error_text(error)}{f' ({where})' if where else ''}", 1)
    sys.exit(code)


def _parameter(error: Exception) -> str:
    """How to set a parameter of the method that was given as an option; empty for other errors."""
    from fewbytes.methods import METHODS

    option = str(getattr(error, "option_name", ""))
    key = option.lstrip("-").replace("-", "_")
    named = [METHODS[name] for name in sys.argv[2:] if name in METHODS] or [METHODS["fedavg"]]
    if not any(key in method.defaults() for method in named):
        return ""
    values = [after for before, after in itertools.pairwise(sys.argv) if before == option]
    return f"{option} is a parameter of the method, not an option: use --set {key}={(values or ['VALUE'])[0]}"


def _fail(text: str, code: int) -> int:
    if os.environ.get("FEWBYTES_DEBUG"):
        console.print_exception()
    console.print(Text.assemble(("fewbytes:", "bold red"), f" {text}".replace("\n", " ")), soft_wrap=True)
    return code
