"""Metrics, health and status over HTTP, scraped as an operator's tools do."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import fewbytes
from runs import PATIENCE, until
from started import started

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

from scraping import free_port, get, scraped

import fewbytes as fb
from fewbytes.federation import metrics
from fewbytes.federation.endpoint import of_run, parse, serving
from fewbytes.running.node_status import NodeWatch
from fewbytes.running.status import Status

ROOT = Path(__file__).parents[2]
PROCESS = {f"fewbytes_process_{name}" for name in (
    "cpu_seconds_total", "resident_memory_bytes", "virtual_memory_bytes", "start_time_seconds", "open_fds", "max_fds"
)}  # fmt: skip


def test_a_run_is_scraped_while_it_goes_on(tmp_path):
    port, folder = free_port(), tmp_path / "runs"
    command = [sys.executable, "-m", "fewbytes", "run", "fedavg", "--clients", "3", "--rounds", "100000"]
    with ExitStack() as stack:
        monitor = ["--monitor", str(port), "--out", str(folder), "--samples", "20/5"]
        process = started([*command, *monitor], tmp_path / "log", stack, cwd=tmp_path)
        assert until(lambda: scraped(port).get("fewbytes_rounds_done", 0) >= 3, PATIENCE)
        first, rows = scraped(port), len((next(folder.iterdir()) / "rounds.jsonl").read_text().splitlines())
        assert {re.sub(r" .*", "", name) for name in first} == metrics.RUN.keys() | PROCESS
        assert first["fewbytes_process_cpu_seconds_total"] > 0.5  # of the run's process, which imports torch
        assert first["fewbytes_process_resident_memory_bytes"] > 1e8
        assert first["fewbytes_rounds_done"] <= rows
        assert (first["fewbytes_sites"], first["fewbytes_sites_present"], first["fewbytes_running"]) == (3, 3, 1)
        assert first["fewbytes_bytes_total up"] > 0 < first["fewbytes_bytes_total down"]
        assert first["fewbytes_site_present client 2"] == 1
        assert get(port, "/health") == (200, "healthy\n")
        url = f"http://127.0.0.1:{port}"
        assert "running, round" in fewbytes("status", url).stdout
        assert json.loads(fewbytes("status", url, "--json").stdout)["rounds"] == 100000
        assert until(lambda: scraped(port)["fewbytes_rounds_done"] > first["fewbytes_rounds_done"], PATIENCE)
        assert get(port, "/other")[0] == 404
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == 130
    shown = fewbytes("status", "--out", folder)
    assert (shown.returncode, "stopped (interrupted by Ctrl-C" in shown.stdout) == (1, True)


def test_health_of_a_run(tmp_path):
    with serving(str(port := free_port()), of_run(tmp_path)):
        assert get(port, "/health") == (200, "starting\n")
        assert get(port, "/metrics") == (200, "\n")
        assert get(port, "/status")[0] == 503
        stopped = Status("r", "fedavg", "stopped", "no disk space", written=1.0)
        stopped.write(tmp_path)
        assert get(port, "/health")[0] == 200  # of an earlier process
        stopped.written = 1e12
        stopped.write(tmp_path)
        assert get(port, "/health") == (503, "the run r has stopped: no disk space\n")
        assert fewbytes("status", f"http://127.0.0.1:{port}").returncode == 1


def test_health_and_metrics_of_nodes():
    nodes = [NodeWatch(name, "server:9092") for name in ("north", "south")]
    with serving(str(port := free_port()), lambda: [node.read() for node in nodes]):
        code, text = get(port, "/health")
        assert (code, text.count("\n")) == (503, 1)
        assert "north is not connected to server:9092" in text
        for node in nodes:
            node.connected()
            node.moved(10, 200)
            node.answered(1, 2.5, declined=False, failed=False)
        nodes[1].answered(2, 0.0, declined=True, failed=True)
        assert get(port, "/health") == (200, "healthy\n")
        text = get(port, "/metrics")[1]
        assert 'fewbytes_node_runs{node="south"} 2.0' in text
        assert 'fewbytes_node_refusals_total{node="south"} 1.0' in text
        assert 'fewbytes_node_bytes_total{direction="received",node="north"} 200.0' in text
        assert {name.split()[0] for name in scraped(port)} == metrics.NODE.keys() | PROCESS
        shown = fewbytes("status", f"http://127.0.0.1:{port}")
        assert shown.returncode == 0
        assert shown.stdout.count("connected to server:9092") == 2


def test_it_listens_on_this_machine_alone():
    assert parse("9100") == ("127.0.0.1", 9100)
    for address in ("", "0", "65536", "a b:9100", ":9100", "::1:9100", "http://127.0.0.1:9100"):
        with pytest.raises(fb.UserError, match=r"expected \[HOST:\]PORT"):
            parse(address)


def test_a_port_in_use_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as there:
        taken = str(there.getsockname()[1])
        shown = fewbytes("run", "fedavg", "--rounds", "1", "--monitor", taken, cwd=tmp_path)
    assert (shown.returncode, "cannot listen" in shown.stderr) == (2, True)
    assert not list((tmp_path / "runs").iterdir())


def test_without_its_library_the_extra_is_named():
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from fewbytes.federation.endpoint import serving\n"
        "with serving('9100', lambda: None): pass"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'fewbytes[monitor]'" in done.stderr


def test_the_dashboard_asks_for_metrics_that_exist():
    board = json.loads((ROOT / "examples" / "09_containers" / "dashboard.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"fewbytes_\w+", query)}
    of_process = {"fewbytes_process_cpu_seconds_total", "fewbytes_process_resident_memory_bytes"}
    assert asked == metrics.RUN.keys() | metrics.NODE.keys() | of_process
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    columns = [(panel["gridPos"]["x"], panel["gridPos"]["w"]) for panel in board["panels"]]
    assert all(x + width <= 24 for x, width in columns)


def test_the_page_lists_every_metric():
    page = (ROOT / "docs" / "operators.md").read_text()
    assert set(re.findall(r"`(fewbytes_\w+)`", page)) == metrics.RUN.keys() | metrics.NODE.keys() | PROCESS
