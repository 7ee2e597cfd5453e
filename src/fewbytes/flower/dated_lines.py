"""Lines of servers and nodes: each begins with its date, and the files that keep them stay small."""

from __future__ import annotations

import io
import logging
import re
import threading
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, TextIO

FILE_BYTES = 500_000  # of a log, and of the older one beside it: at most 1 MB of a log is kept
TAIL_BYTES = 1 << 16  # of what a process printed last
LINE_BYTES = 1 << 14  # longer lines are split
DATED = re.compile(r"\s*\d{4}-\d\d-\d\d[T ]\d\d:\d\d")


def dated(line: str) -> str:
    """A line with the local time before it, unless it is dated or empty."""
    return line if DATED.match(line) or not line.strip() else f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}"


class DatedLines(io.TextIOBase):
    """A stream that writes to another, with dates before lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._begins = stream, True

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Write a text, at once."""
        for piece in text.splitlines(keepends=True):
            self._stream.write(dated(piece) if self._begins else piece)
            self._begins = piece.endswith("\n")
        return len(text)

    def flush(self) -> None:
        """Flush the other stream."""
        self._stream.flush()


class LogFile:
    """Keeps what a process prints: dated lines in a file and, once that is full, the ones before in `<name>.1`."""

    def __init__(self, path: Path, output: IO[bytes]) -> None:
        self.path, self._output, self._tail = path, output, b""
        self._handler = RotatingFileHandler(path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def tail(self) -> bytes:
        """What the process printed last, without dates; complete if the process has ended."""
        self._thread.join(1.0)  # longer if a child of the process prints to it, too
        return self._tail

    def _read(self) -> None:
        with self._output:
            while line := self._output.readline(LINE_BYTES):
                self._tail = (self._tail + line)[-TAIL_BYTES:]
                text = dated(line.decode(errors="replace").rstrip("\r\n"))
                self._handler.handle(logging.makeLogRecord({"msg": text}))
        self._handler.close()
