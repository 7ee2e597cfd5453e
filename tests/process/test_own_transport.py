"""`examples/07_own_transport`: a server and three clients, processes of their own, over HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from modules import needs
from runs import PATIENCE

needs("aiohttp")

EXAMPLE = Path(__file__).parents[2] / "examples" / "07_own_transport"
LINE = re.compile(r"round (\d+): accuracy ([\d.]+) %, so far (\d+) kB up, (\d+) kB down \((\d+) kB each way")


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(EXAMPLE / script), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextmanager
def served(rounds: int, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server on a free port, and its address."""
    server = start("server.py", "--port", "0", "--rounds", str(rounds), *options)
    try:
        line = server.stdout.readline()
        assert line.startswith("listening on "), line + server.stdout.read()
        yield server, line.removeprefix("listening on ").strip()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What they have printed, once all have ended well."""
    printed = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), printed
    return printed


@pytest.mark.parametrize(("up", "down", "fewer"), [("0.5", "1", (40, 3)), (None, None, (1.3, 1.1))])
def test_three_clients_train_together_in_few_bytes(up, down, fewer):
    with served(5, *(["--bits", down] if down else [])) as (server, address):
        options = ["--server", address, *(["--bits", up] if up else [])]
        clients = [start("client.py", str(i), *options) for i in range(3)]
        printed, *others = ended([server, *clients])
    assert others == [""] * 3
    rows = [tuple(map(float, row)) for row in LINE.findall(printed)]
    assert [row[0] for row in rows] == [1, 2, 3, 4, 5]
    _, accuracy, sent, received, plain = rows[-1]
    assert accuracy > 85
    assert plain / sent > fewer[0]
    assert plain / received > fewer[1]


def test_a_client_that_is_killed_and_restarted_gets_the_whole_model():
    with served(4, "--bits", "1") as (server, address):
        options = ["--server", address, "--bits", "0.5"]
        clients = [start("client.py", str(i), *options) for i in range(3)]
        while not (line := server.stdout.readline()).startswith("round 1"):
            assert line
        clients[0].kill()
        clients[0].communicate()
        clients[0] = start("client.py", "0", *options)
        printed, *_ = ended([server, *clients])
    assert "round 4" in printed


def test_what_is_no_reply_is_refused():
    with served(1) as (_, address):
        for version, code in ((1, 400), (7, 409)):
            with pytest.raises(HTTPError) as refused:
                urlopen(f"{address}/update?client=0&version={version}", b"words", timeout=PATIENCE)
            assert refused.value.code == code
            refused.value.close()
