"""What the comparison measures: seconds, the bytes that pass the sites' links, and the accuracy of each model."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from task import accuracy

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from proxy import Faults, Proxy  # noqa: E402


class Terms(NamedTuple):
    """Of a run: sites, the images of each, rounds, and each link's Mbit/s."""

    sites: int
    images: int
    rounds: int
    mbit: float


class Links:
    """The sites' links to a server: a proxy each. `passed`: seconds, and all bytes up and down until then."""

    def __init__(self, terms: Terms) -> None:
        self.sites, self.faults = terms.sites, Faults(terms.mbit * 1e6 / 8)
        self.proxies: list[Proxy] = []
        self.passed: list[tuple[float, int, int]] = []

    @contextmanager
    def to(self, port: int) -> Iterator[list[int]]:
        """The ports at which sites reach a server's."""
        ended = threading.Event()
        with ExitStack() as stack:
            self.proxies = [
                stack.enter_context(Proxy("127.0.0.1", port, self.faults, self.faults, site))
                for site in range(self.sites)
            ]
            thread = threading.Thread(target=self._watch, args=(ended,), daemon=True)
            thread.start()
            try:
                yield [proxy.port for proxy in self.proxies]
            finally:
                ended.set()
                thread.join()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(0.1):
            counts = [proxy.snapshot() for proxy in self.proxies]
            self.passed.append((time.time(), sum(up for up, _ in counts), sum(down for _, down in counts)))

    def between(self, start: float, end: float) -> tuple[float, float]:
        """MB up and down from one time to another."""
        first, last = ([row for row in self.passed if row[0] <= at][-1:] or self.passed[:1] for at in (start, end))
        return (last[0][1] - first[0][1]) / 1e6, (last[0][2] - first[0][2]) / 1e6


class Measured(NamedTuple):
    """By round: seconds since the first model left the server, MB up and down, and the global model's accuracy."""

    seconds: list[float]
    up: list[float]
    down: list[float]
    accuracy: list[float]

    def first(self, target: float) -> int | None:
        """The first round (from 0) whose model is as accurate as that."""
        return next((r for r, value in enumerate(self.accuracy) if value >= target), None)


Start = Callable[[Path, dict[str, str], Terms, Links], None]
"""Runs a system in a folder, with an environment, over links."""


def measured(start: Start, own: dict[str, str], terms: Terms) -> Measured:
    """Run a system that keeps each round's model (`task.keep`); these are scored when it has ended."""
    links = Links(terms)
    with prepared(terms, own) as (place, environment):
        start(place, environment, terms, links)
        files = [place / "models" / f"{r}.pt" for r in range(terms.rounds + 1)]
        times = [file.stat().st_mtime for file in files]
        sent = [links.between(times[0], at) for at in times[1:]]
        found = [accuracy(file) for file in files[1:]]
    return Measured([at - times[0] for at in times[1:]], [up for up, _ in sent], [down for _, down in sent], found)


def measured_alone(start: Callable[[Path, dict[str, str], Terms], None], terms: Terms) -> Measured:
    """Training alone: when the last site had trained an epoch, since all had started, and the mean accuracy of the
    sites' models."""
    with prepared(terms, {}) as (place, environment):
        start(place, environment, terms)
        found = [[place / "models" / f"{s}-{r}.pt" for s in range(terms.sites)] for r in range(terms.rounds + 1)]
        begun, *ends = (max(file.stat().st_mtime for file in files) for files in found)
        scores = [fmean(map(accuracy, files)) for files in found[1:]]
    return Measured([end - begun for end in ends], [0.0] * terms.rounds, [0.0] * terms.rounds, scores)


@contextmanager
def prepared(terms: Terms, own: dict[str, str]) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder for a system, and its environment."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "models").mkdir()
        yield place, os.environ | own | {
            "LINKS_SITES": str(terms.sites), "LINKS_IMAGES": str(terms.images), "LINKS_OUT": str(place / "models"),
            "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }  # fmt: skip
