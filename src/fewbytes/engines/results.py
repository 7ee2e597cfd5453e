"""The result of a job: its reply, or the error that it raised."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from fewbytes.base.errors import FewbytesError, FrameError, MethodError, UserError, error_text, public_text, raised_at
from fewbytes.engines.handlers import Done, Job, Runner
from fewbytes.wire import Frame


def attempt(runner: Runner, job: Job, frames: Sequence[memoryview]) -> tuple[Done, Frame | None]:
    """Run a job; an error becomes its result."""
    try:
        return runner.run(job, frames)
    except (Exception, SystemExit) as error:  # whatever a handler raises is reported with its client and round
        done = unable(job, error)
        if isinstance(error, FrameError) and error.code == "base":
            done.first = runner.firsts.of(job.client).digest  # the server then sends messages in full
        return done, None


def unable(job: Job, error: BaseException) -> Done:
    """The result of a job that raised an error: in one line the error's class (unless it is this package's), its text
    and the place in the handler's code; and the text that a server may see."""
    text = str(error) if isinstance(error, FewbytesError) else error_text(error)
    trace = "" if isinstance(error, UserError) else "".join(traceback.format_exception(error))
    line = text.replace("\n", " ") or type(error).__name__
    where = raised_at(error, own_code=True) if trace else ""
    return Done(job.number, error=f"{line} ({where})" if where else line, trace=trace, public=public_text(error))


def failed(job: Job, done: Done) -> Exception:
    """The error to raise for a failed job, with its client, round and handler."""
    where = f"client {job.client}, round {job.round}, handler {job.handler!r}"
    if done.error.startswith("OSError: [Errno 28]"):
        return OSError(28, f"No space left on device ({where})")
    if not done.trace:
        return UserError(f"{where}: {done.error}")
    error = MethodError(f"{where}: {done.error}")
    error.add_note(done.trace)
    return error
