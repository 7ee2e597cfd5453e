"""A report says what its run folders say, all of it and nothing else, and does so offline."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]
import pyarrow.parquet as pq  # type: ignore[import-untyped, unused-ignore]
import pytest
import torch
from PIL import Image, PngImagePlugin
from rich.console import Console

from fewbytes.base.errors import UserError
from fewbytes.base.units import in_unit
from fewbytes.core import gallery
from fewbytes.report import activations, pictures, read_run, read_runs, summary_table, write_report
from fewbytes.report.folder import RunFolder
from fewbytes.report.table import KINDS

CLIENTS, ROUNDS = 8, 6
HOSTILE = '</script><img src="http://evil.test/x" onerror="document.title=1"><b>&amp;%{y}'


def make_run(
    folder: Path,
    method: str = "fedavg",
    kinds: Sequence[str] = ("global", "personalised"),
    size: int = 40_000,
    every: int = 1,
    phases: bool = False,
    classes: Sequence[str] = tuple("0123456789"),
    config: str = "",
    seed: int = 0,
    **parameters: Any,
) -> Path:
    """A run folder like those `fewbytes run` leaves; every client sends `size` bytes and a few of its own."""
    folder.mkdir(parents=True)
    ledger: list[tuple[int, str, int, int, int, int, int, int, int]] = []
    rows: list[dict[str, Any]] = []
    steps = [(t, "round") for t in range(1, ROUNDS + 1)]
    for t, phase in [(0, "start"), *steps, (ROUNDS + 1, "finish")] if phases else steps:
        mine = [
            (t, "train", c, size, size // 2 + 7 * c + t, int(size * 1.2), int(size * 0.6), 0, 80)
            for c in range(CLIENTS)
        ]
        ledger += mine
        curve = 0.95 - 0.6 * 0.7 ** (t + len(method) % 3)
        measured = {kind: curve - 0.04 * k for k, kind in enumerate(kinds)} if t % every == 0 else {}
        rows.append(
            {
                "round": t,
                "phase": phase,
                "cohort": CLIENTS,
                "scores": {"accuracy": measured} if measured else {},
                "loss": {"train": float("nan")},
                "uplink_bytes": sum(row[4] for row in mine),
                "downlink_bytes": sum(row[3] for row in mine),
                "uplink_nominal_bytes": sum(row[6] + row[8] // 8 for row in mine),
                "downlink_nominal_bytes": sum(row[5] for row in mine),
                "seconds": 1.25,
            }
        )
    names = "round handler client bytes_down bytes_up value_bytes_down value_bytes_up mask_bits_down mask_bits_up"
    types = [pa.int32(), pa.string(), pa.int32()] + [pa.int64()] * 6
    columns = [pa.array(values, kind) for values, kind in zip(zip(*ledger, strict=True), types, strict=True)]
    pq.write_table(pa.table(columns, names=names.split()), folder / "ledger.parquet")
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    counts = [[(37 * c + 11 * k) % 61 if (c + k) % 3 else 0 for k in range(len(classes))] for c in range(CLIENTS)]
    partition = {"classes": list(classes), "train": counts, "test": [[n // 4 for n in row] for row in counts]}
    (folder / "partition.json").write_text(json.dumps(partition), "utf-8")
    (folder / "config.toml").write_text(config or f'method = "{method}"\ndataset = "digits"\n', "utf-8")
    scores = {
        kind: {"final": curve[-1], "best": max(curve)}
        for kind in kinds
        for curve in [[row["scores"]["accuracy"][kind] for row in rows if row["scores"]]]
    }
    totals = {name: sum(row[name] for row in rows) for name in rows[0] if name.endswith("_bytes")}
    result = {
        "method": method,
        "parameters": parameters,
        "dataset": "digits",
        "model": "mlp",
        "clients": CLIENTS,
        "seed": seed,
        "rounds": ROUNDS,
        "score": {"metric": "accuracy", "kind": kinds[0], **scores[kinds[0]], "best_round": ROUNDS, "all": scores},
        "majority_class_accuracy": {"global": 0.1, "personalised": 0.4},
        **totals,
        "uplink_bytes_per_client_round": totals["uplink_bytes"] / CLIENTS / ROUNDS,
        "downlink_bytes_per_client_round": totals["downlink_bytes"] / CLIENTS / ROUNDS,
        "seconds": 7.5,
        "peak_memory_bytes": 10**8,
        "versions": {"fewbytes": "0.1.0", "torch": "2.9.0"},
        "status": "done",
    }
    (folder / "result.json").write_text(json.dumps(result), "utf-8")
    return folder


def leave_out(folder: Path, *left: tuple[int, int, str, str], why: str = "no reply within 60 s") -> Path:
    """Make of a run one in which exchanges (round, client, handler, outcome) ended without a used reply."""
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text("utf-8").splitlines()]
    for row in rows:
        mine = [
            {"client": client, "handler": handler, "outcome": outcome, "why": why}
            for t, client, handler, outcome in left
            if t == row["round"]
        ]
        row |= {"left_out": mine} if mine else {}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    ledger = pq.read_table(folder / "ledger.parquet")
    how = {(t, client, handler): outcome for t, client, handler, outcome in left}
    exchanges = zip(*(ledger[name].to_pylist() for name in ("round", "client", "handler")), strict=True)
    outcomes = pa.array([how.get(exchange, "answered") for exchange in exchanges], pa.string())
    pq.write_table(ledger.append_column("outcome", outcomes), folder / "ledger.parquet")
    return folder


def join(folder: Path, t: int, **about: Any) -> None:
    """A line more, of a client that joined before round t."""
    lines = (folder / "rounds.jsonl").read_text("utf-8").splitlines()
    row = {
        "round": t,
        "phase": "join",
        "scores": {"accuracy": {"global": 0.999}},
        "uplink_bytes": 1,
        "downlink_bytes": 1,
    } | about
    lines.insert(t - 1, json.dumps(row))
    (folder / "rounds.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


def show(folder: Path, rounds: Sequence[int], labels: Sequence[str] = ("cat", "dog"), panel: str = "before") -> Path:
    """Give a run a gallery: grey images, the lighter the later, and points of two panels, all of round t of size t."""
    for t in rounds:
        images = torch.full((len(labels), 1, 8, 8), t, dtype=torch.uint8)
        points = torch.eye(4, 9)[:, : 4 + t % 5] * t
        before = {panel: {"prototypes": (points, torch.arange(4) % 3)}}
        after = {"after": {"prototypes": (points, torch.arange(4) % 3), HOSTILE: (points[:2], None)}}
        gallery.keep(
            folder,
            t,
            {"made.png": gallery.Images(images, labels).drawn(), "map.json": gallery.Points(before | after).drawn()},
        )
    return folder


def make_compare(folder: Path) -> Path:
    """A compare folder of three methods, judged by different kinds of accuracy."""
    make_run(folder / "1-fedavg")
    make_run(folder / "2-fedpurin", "fedpurin", ("sparse", "personalised", "combined"), 12_000, phases=True, tau=0.5)
    make_run(folder / "3-fedktl", "fedktl", ("personalised",), 900, every=2)
    return folder


def ledger_sum(folder: Path, column: str) -> int:
    return sum(pq.read_table(folder / "ledger.parquet")[column].to_pylist())


# ---- reading ----


def test_a_run_is_read_whole(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", "fedpurin", ("sparse", "personalised"), phases=True))
    assert (run.label, run.kind, run.kinds(), run.clients, run.status) == (
        "fedpurin",
        "sparse",
        ["sparse", "personalised"],
        CLIENTS,
        "done",
    )
    assert [row["phase"] for row in run.rounds] == ["start", *["round"] * ROUNDS, "finish"]
    assert run.total_bytes("uplink") == ledger_sum(run.path, "bytes_up") == sum(run.bytes_by_client("uplink").values())
    assert run.total_bytes("downlink") == ledger_sum(run.path, "bytes_down")
    assert run.score("sparse").best_row is run.rounds[-1]
    assert run.score("no such kind") == (None, None, None)


def test_a_killed_run_is_read_as_far_as_it_got(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", every=4)
    whole = read_run(folder)
    for name in ("result.json", "ledger.parquet", "partition.json"):
        (folder / name).unlink()
    run = read_run(folder)
    assert (run.label, run.kind, run.status, run.clients) == ("fedavg", "global", "unfinished", None)
    assert run.rounds == whole.rounds
    for direction in ("uplink", "downlink"):
        assert run.total_bytes(direction) == whole.total_bytes(direction)
        assert run.nominal_bytes(direction) == whole.nominal_bytes(direction)
        assert run.bytes_per_client_round(direction) == whole.bytes_per_client_round(direction)
    assert (
        run.score("global")
        == whole.score("global")
        == (run.rounds[3]["scores"]["accuracy"]["global"],) * 2 + (run.rounds[3],)
    )
    assert run.seconds == whole.seconds == 1.25 * ROUNDS
    assert "unfinished" in write_report([run], tmp_path / "report.html").read_text("utf-8")


def test_what_a_killed_run_left_from_before_it_was_resumed_hides_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    rows = (folder / "rounds.jsonl").read_text("utf-8")
    more = json.loads(rows.splitlines()[-1]) | {"round": ROUNDS + 1, "scores": {"accuracy": {"global": 0.99}}}
    (folder / "rounds.jsonl").write_text(rows + json.dumps(more) + "\n", "utf-8")
    run = read_run(folder)
    assert run.total_bytes("uplink") == ledger_sum(folder, "bytes_up") + more["uplink_bytes"]
    assert run.score("global")[:2] == (0.99, 0.99)
    assert run.seconds == 1.25 * (ROUNDS + 1)


def test_a_run_killed_before_its_first_round_still_has_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "config.toml").write_text('method = "fedavg"')
    (folder / "rounds.jsonl").touch()
    runs = read_runs([folder, make_run(tmp_path / "b", "fedpurin")])
    Console(width=100).print(summary_table(runs))
    assert "fedavg and fedpurin" in write_report(runs, tmp_path / "two.html").read_text("utf-8")
    assert "No score has been measured" in write_report(runs[:1], tmp_path / "one.html").read_text("utf-8")


def test_what_is_no_run_folder_is_said_in_one_line(tmp_path: Path) -> None:
    for path, words in [(tmp_path / "none", "there is no run folder"), (tmp_path, "no rounds.jsonl.*bytes.jsonl")]:
        for read in (read_run, lambda p: read_runs([p])):
            with pytest.raises(UserError, match=words) as caught:
                read(path)
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.toml", "method = "),
        ("rounds.jsonl", "nonsense"),
        ("rounds.jsonl", '{"round": 1}\n'),
        ("rounds.jsonl", '{"round": "1", "phase": "round", "uplink_bytes": 1, "downlink_bytes": 1}\n'),
        (
            "rounds.jsonl",
            '{"round": 1, "phase": "round", "uplink_bytes": 1, "downlink_bytes": 1, "left_out": [{"client": 1}]}\n',
        ),
        ("ledger.parquet", "PAR1 but not for long"),
        ("partition.json", '{"classes": ["0", "1"], "train": [[1]], "test": [[1]]}'),
        ("result.json", "{"),
        ("result.json", '{"seconds": "long"}'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    folder = make_run(tmp_path / "a")
    (folder / name).write_text(text, "utf-8")
    with pytest.raises(UserError, match=re.escape(f"{folder / name} is damaged")) as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)


def test_a_ledger_without_its_columns_is_damaged(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    whole = pq.read_table(folder / "ledger.parquet")
    numbers = whole.append_column("outcome", pa.array([0] * len(whole)))
    for table in (pa.table({"client": [1]}), numbers):
        pq.write_table(table, folder / "ledger.parquet")
        with pytest.raises(UserError, match=r"ledger\.parquet is damaged"):
            read_run(folder)


def test_a_compare_folder_is_its_runs_and_none_is_read_twice(tmp_path: Path) -> None:
    folder = make_compare(tmp_path / "c")
    runs = read_runs([folder, folder / "1-fedavg"])
    assert [run.label for run in runs] == ["fedavg", "fedpurin", "fedktl"]


def test_runs_of_one_method_are_told_apart(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "a", "fedpurin", tau=0.3, lr=0.1),
        make_run(tmp_path / "b", "fedpurin", tau=0.5, lr=0.1),
        make_run(tmp_path / "c"),
        make_run(tmp_path / "d", seed=1),
    ]
    names = [run.label for run in read_runs(folders)]
    assert names == ["fedpurin (tau=0.3)", "fedpurin (tau=0.5)", "fedavg (seed=0)", "fedavg (seed=1)"]
    settings = ['method = "y"', 'method = "y"\nbackdoor = 2']  # a setting that only the second names
    named = [make_run(tmp_path / f"y{i}", "y", config=text) for i, text in enumerate(settings)]
    assert [run.label for run in read_runs(named)] == ["y (backdoor=None)", "y (backdoor=2)"]
    twins = [make_run(tmp_path / "e", "x"), make_run(tmp_path / "f", "x")]
    assert [run.label for run in read_runs(twins)] == ["x (e)", "x (f)"]
    namesakes = [make_run(tmp_path / "g" / "x", "x"), make_run(tmp_path / "h" / "x", "x")]
    assert len({run.label for run in read_runs(namesakes)}) == 2


# ---- the terminal ----


def said_below(runs: list[RunFolder]) -> list[str]:
    """The lines under the table, but what the kinds of scores mean."""
    lines = str(summary_table(runs).caption).splitlines()
    return [line for line in lines if line.partition(": ")[0] not in KINDS]


def test_the_table_fits_100_columns_and_tells_the_ledger(tmp_path: Path) -> None:
    folder = make_compare(tmp_path / "c")
    make_run(folder / "4", "a-method-with-a-rather-long-name[bold]", ("personalised",), 30_000_000)
    console = Console(width=100, record=True)
    console.print(summary_table(read_runs([folder])))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert "…" not in text
    assert "[bold]" in text
    *_, last = (n for n, line in enumerate(lines) if line.rstrip().endswith("7.5"))
    assert "majority class" in "".join(lines[last + 1 : last + 3])
    assert "global: the global model, on the server's test data" in text
    assert "newcomers: " not in text  # no run has such a score
    assert "10.0%" in text
    assert "40.0%" in text
    up, down = (ledger_sum(folder / "1-fedavg", name) / 1e6 for name in ("bytes_up", "bytes_down"))
    row = next(line for line in lines if " fedavg " in line)
    assert row.split()[-4:] == [f"{up:.3g}", f"{down:.3g}", f"{up + down:.3g}", "7.5"]


# ---- the page ----


class Page(HTMLParser):
    """What a browser would make of the page: its tags with their attributes, and the text of its cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_totals_shown_are_the_ledgers(tmp_path: Path) -> None:
    folder = make_compare(tmp_path / "c")
    text = write_report(read_runs([folder]), tmp_path / "out" / "report.html").read_text("utf-8")
    for child in folder.iterdir():
        for column in ("bytes_up", "bytes_down"):
            total = ledger_sum(child, column)
            assert f'<td class="strong" title="{total:,} bytes">{in_unit(total, "kB")}</td>' in text
        total = ledger_sum(child, "bytes_up") + ledger_sum(child, "bytes_down")
        assert (
            f'<td class="strong" title="{total:,} bytes">{in_unit(total, "kB")}</td><td>' in text
        )  # before the seconds
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    assert "Which to take" in text
    assert "ends highest" not in text  # beside a recommendation it may name another method


def test_a_single_run_says_how_sure_its_score_is(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    assert run.result is not None
    final = run.score("global").final

    def sentences() -> list[str]:
        text = write_report([run], tmp_path / "r.html").read_text("utf-8")
        return text.partition("in both directions.\n")[2].partition("</p>")[0].splitlines()

    assert sentences() == ["The score is better than guessing the majority class, 10.0%."]
    run.result["global_model"] = {"intervals": {"accuracy": [0.8, 0.95]}}
    run.result["test_samples"] = {"global": 100}
    run.result["majority_class_accuracy"] = {"global": final}
    interval, guess = sentences()
    assert interval == "The 95 % bootstrap interval of the score is 80.0% to 95.0%."
    assert guess.startswith(f"The score is no better than guessing the majority class, {final:.1%} (up to ")


def test_the_page_asks_for_nothing_and_names_what_it_shows(tmp_path: Path) -> None:
    page = write_report(read_runs([make_compare(tmp_path / "c")]), tmp_path / "r.html")
    assert page.stat().st_size < 1_500_000
    tags = Page(page.read_text("utf-8")).tags
    assert not [tag for tag, attrs in tags if {"src", "srcset", "action"} & attrs.keys()]
    assert {tag for tag, attrs in tags if "href" in attrs} == {"a"}  # to click: the glossary
    assert ("html", {"lang": "en"}) in tags
    assert all("scope" in attrs for tag, attrs in tags if tag == "th")
    drawings = [attrs for _, attrs in tags if attrs.get("class") == "chart"]
    assert len(drawings) == 11
    assert all(attrs["aria-label"] for attrs in drawings)


def test_the_policy_lets_the_scripts_of_the_page_run(tmp_path: Path) -> None:
    text = write_report([read_run(make_run(tmp_path / "a"))], tmp_path / "r.html").read_text("utf-8")
    policies = [attrs["content"] or "" for tag, attrs in Page(text).tags if tag == "meta" and "http-equiv" in attrs]
    scripts = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    [packed] = re.findall('<script type="application/gzip" id="plotly">(.*?)</script>', text, re.DOTALL)
    scripts.append(gzip.decompress(base64.b64decode(packed)).decode())
    assert len(scripts) == 2
    for script in scripts:
        digest = hashlib.sha256(script.encode()).digest()
        assert f"'sha256-{base64.b64encode(digest).decode()}'" in policies[0]


def test_every_chart_has_its_numbers(tmp_path: Path) -> None:
    for name in ("fedavg", "fedper"):
        make_run(tmp_path / name, name)
    text = write_report(read_runs([tmp_path]), tmp_path / "r.html").read_text("utf-8")
    charts = [figure for figure in re.findall("<figure>.*?</figure>", text, re.DOTALL) if 'class="chart"' in figure]
    assert len(charts) >= 7
    assert all("<summary>Numbers</summary>" in chart for chart in charts)
    [scores] = [chart for chart in charts if 'id="scores-rounds"' in chart]
    of_fedavg = re.findall(r'<th scope="row">fedavg</th><td>(.*?)</td>', scores)
    curve = [0.95 - 0.6 * 0.7 ** (t + len("fedavg") % 3) for t in range(1, ROUNDS + 1)]
    assert of_fedavg[0] == "; ".join(f"{t}: {value:.4g}" for t, value in enumerate(curve, 1))


def test_what_a_run_is_called_is_text_wherever_it_stands(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>"
    for name in ("a", "b"):
        folder = make_run(tmp_path / name, hostile, (hostile, "personalised"), classes=(hostile, "1"), config="x = 1")
        leave_out(folder, (1, 1, hostile, hostile), why=hostile)
        show(folder, [1], (hostile, "dog"), hostile)
        partition = json.loads((folder / "partition.json").read_text("utf-8"))
        partition["train"][0] = 10 if name == "a" else 11  # what a node tells, so that the page has a table of it
        (folder / "partition.json").write_text(json.dumps(partition), "utf-8")
        result = json.loads((folder / "result.json").read_text("utf-8"))
        result |= {"dataset": hostile, "model": hostile, "seed": hostile, "versions": {hostile: f"{hostile}{name}"}}
        result["versions_at_clients"] = {hostile: {hostile: {"node": hostile, "server": hostile}}}
        (folder / "result.json").write_text(json.dumps(result), "utf-8")
        rows = (folder / "rounds.jsonl").read_text("utf-8").splitlines()
        rows[0] = json.dumps(json.loads(rows[0]) | {"notes": {hostile: hostile}})
        (folder / "rounds.jsonl").write_text("\n".join(rows), "utf-8")
    text = write_report(read_runs([tmp_path]), tmp_path / "r.html").read_text("utf-8")
    assert hostile not in text
    assert [tag for tag, _ in Page(text).tags].count("script") == 3
    assert "&lt;script&gt;alert(1)&lt;/script&gt; (a) and &lt;script&gt;" in text


def test_versions_at_clients_that_differ_are_below_the_runs(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    result = json.loads((folder / "result.json").read_text("utf-8"))
    result["versions_at_clients"] = {
        "1": {"torch": {"node": "2.6.0", "server": "2.9.0"}, "python": {"node": "3.12.1", "server": "3.11.7"}}
    }
    (folder / "result.json").write_text(json.dumps(result), "utf-8")
    partition = json.loads((folder / "partition.json").read_text("utf-8"))
    partition["names"] = [f"site-{i}" for i in range(CLIENTS)]
    (folder / "partition.json").write_text(json.dumps(partition), "utf-8")
    text = write_report(read_runs([folder]), tmp_path / "r.html").read_text("utf-8")
    assert "client 1 (site-1): torch 2.6.0 (server: 2.9.0), python 3.12.1 (server: 3.11.7)" in text


def test_only_what_writes_a_page_imports_what_makes_pages() -> None:
    code = "import sys, fewbytes.report; print(sorted({'jinja2'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


LEFT = [(1, 2, "train", "late"), (1, 5, "train", "rejected"), (3, 2, "train", "late"), (3, 4, "train", "unreachable")]


def test_who_was_left_out_is_named(tmp_path: Path) -> None:
    left = [*LEFT, (2, 0, "train", "surplus"), (2, 1, ":score", "late")]
    run = read_run(leave_out(make_run(tmp_path / "a"), *left))
    text = write_report([run], tmp_path / "r.html").read_text("utf-8")
    told = text.partition("<h2>Left out</h2>")[2].partition("</p>")[0]
    for words in ("4 of 48 ", "2 late, 1 rejected, 1 unreachable", "1 of 48 exchanges was surplus", "failed: 1 late"):
        assert words in told
    rows = [" ".join(re.sub("<[^>]*>", " ", row).split()) for row in re.findall("<tr>.*no reply.*</tr>", text)]
    assert rows == [
        f"round {t} {client} {handler} {outcome} no reply within 60 s"
        for t, client, handler, outcome in [*LEFT[:2], left[5], *LEFT[2:], left[4]]
    ]
    assert run.bytes_by_client("downlink")[2] == ROUNDS * 40_000  # what was not used has crossed the wire as well
    assert run.total_bytes("downlink") == CLIENTS * ROUNDS * 40_000


def test_where_nobody_was_left_out_nothing_is_said(tmp_path: Path) -> None:
    older, newer = make_run(tmp_path / "a"), leave_out(make_run(tmp_path / "b"))
    for folder in (older, newer):
        runs = [read_run(folder)]
        text = write_report(runs, tmp_path / "r.html").read_text("utf-8")
        assert "Left out" not in text
        assert "Joined" not in text
        assert said_below(runs) == []


def test_a_killed_run_names_them_too_and_an_unfinished_step_is_in_the_ledger(tmp_path: Path) -> None:
    folder = leave_out(make_run(tmp_path / "a"), *LEFT)
    lines = (folder / "rounds.jsonl").read_text("utf-8").splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:2]), "utf-8")  # interrupted in round 3
    text = write_report([read_run(folder)], tmp_path / "r.html").read_text("utf-8")
    assert text.count("4 of 48 exchanges had no usable reply") == 2  # in the summary and in the section
    assert text.count("<td>no reply within 60 s</td>") == text.count("unknown: the step was interrupted") == 2
    (folder / "ledger.parquet").unlink()
    text = write_report([read_run(folder)], tmp_path / "r.html").read_text("utf-8")
    assert re.search("<p>2 exchanges .*: 1 late, 1 rejected", text)


def test_what_the_network_says_is_text(tmp_path: Path) -> None:
    for name, why, told in (
        ("a", f"{HOSTILE}\ud800", "<td>&lt;/script&gt;"),
        ("b", "x" * 10_000, f"<td>{'x' * 299}…</td>"),
    ):
        folder = leave_out(make_run(tmp_path / name), (2, 3, "train", "late"), why=why)
        assert told in write_report([read_run(folder)], tmp_path / "r.html").read_text("utf-8")


def test_many_left_out_are_cut_and_the_surplus_ones_first(tmp_path: Path) -> None:
    left = [(1, 1, "train", "surplus")] * 150 + [(2, 2, "train", "late")] * 60
    run = read_run(leave_out(make_run(tmp_path / "a"), *left))
    text = write_report([run], tmp_path / "r.html").read_text("utf-8")
    assert (text.count("<td>late</td>"), text.count("<td>surplus</td>")) == (60, 140)
    assert "10 more in <code>rounds.jsonl</code>" in text


def test_who_joined_is_named_and_counts_but_scores_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    before = read_run(folder)
    join(folder, 4, client=3)
    join(folder, 6)
    run = read_run(folder)
    text = write_report([run], tmp_path / "r.html").read_text("utf-8")
    joined = "Client 3 joined before round 4, a client joined before round 6."
    assert joined in text.partition("<h2>Joined later</h2>")[2]
    assert '"before round 4","1 B"' in text
    assert run.score("global")[:2] == before.score("global")[:2]
    text = write_report([read_run(leave_out(folder, *LEFT))], tmp_path / "r.html").read_text("utf-8")
    assert joined in text.partition("<h2>Left out</h2>")[2]


def test_many_who_joined_together_are_one_phrase_and_the_refused_are_not_among_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    for client in range(10, 60):
        why = {"client": client, "handler": "join", "outcome": "rejected", "why": "no <gene> fits"}
        join(folder, 4, client=client, **({"left_out": [why]} if client in (20, 21) else {}))
    run = read_run(folder)
    text = write_report([run], tmp_path / "r.html").read_text("utf-8")
    assert "2 newcomers. Clients 10 to 19, 22 to 59 joined before round 4." in text
    assert text.count("<td>no &lt;gene&gt; fits</td>") == 2
    table = Console(width=100, record=True, file=io.StringIO())
    table.print(summary_table([run]))
    assert "2 newcomers refused" in table.export_text()


def test_a_comparison_names_them_run_by_run(tmp_path: Path) -> None:
    folder = make_compare(tmp_path / "c")
    leave_out(folder / "1-fedavg", *LEFT)
    leave_out(folder / "3-fedktl", (2, 3, "train", "failed"))
    runs = read_runs([folder])
    text = write_report(runs, tmp_path / "r.html").read_text("utf-8")
    assert "<p><b>fedavg</b>: 4 of 48 exchanges" in text
    assert re.search("<b>fedktl</b>: 1 of 48 .*: 1 failed", text)
    assert "<b>fedpurin</b>: " not in text
    assert all("scope" in attrs for tag, attrs in Page(text).tags if tag == "th")
    console = Console(width=80, record=True)
    console.print(summary_table(runs))
    assert [line.strip() for line in console.export_text().splitlines()][-2:] == [
        "left out: fedavg, 4 of 48 exchanges (2 late, 1 rejected, 1 unreachable)",
        "left out: fedktl, 1 of 48 exchanges (1 failed)",
    ]


def test_a_narrow_terminal_goes_without_what_matters_least(tmp_path: Path) -> None:
    runs = read_runs([make_compare(tmp_path / "c")])
    shown = {}
    for width in (100, 80, 70, 60, 40):
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(summary_table(runs, width))
        text = console.export_text()
        shown[width] = [
            name for name in ("final", "best", "global", "up", "s") if name in text.split("────")[0].split()
        ]
        assert all(run.label in text for run in runs)
        assert "…" not in text
    assert shown[100] == ["global", "up", "s"]  # judged on different test data, so that no column has both
    assert shown[60] == shown[40] == ["global", "up"]


def test_a_run_that_is_no_better_than_guessing_says_so(tmp_path: Path) -> None:
    (run,) = read_runs([make_run(tmp_path / "a")])
    assert "guessing the majority class;" not in str(summary_table([run]).caption)
    final = run.score("global").final
    assert run.result is not None
    run.result["majority_class_accuracy"] = {"global": final}
    line = f"global {final:.1%}: no better than guessing the majority class, {final:.1%}; try another lr"
    assert line in str(summary_table([run]).caption)
    run.result["majority_class_accuracy"] = {"global": final - 0.03}
    assert "no better than guessing" not in str(summary_table([run]).caption)  # on how many samples is not known
    run.result["test_samples"] = {"global": 100, "personalised": 10**6}
    assert " by chance on 100 test samples); try another lr" in str(summary_table([run]).caption)


def shown_images(text: str) -> dict[str, Image.Image]:
    """The images of a page by the words that stand for them."""
    tags = [attrs for tag, attrs in Page(text).tags if tag == "img"]
    data = {str(attrs["alt"]): str(attrs["src"]).removeprefix("data:image/png;base64,") for attrs in tags}
    assert len(data) == len(tags)
    return {alt: Image.open(io.BytesIO(base64.b64decode(text, validate=True))) for alt, text in data.items()}


def charts_of(text: str) -> dict[str, Any]:
    found = re.search('id="charts">(.*?)</script>', text, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_of_very_many_clients_neighbours_are_drawn_together(tmp_path: Path) -> None:
    def page(clients: int) -> tuple[dict[str, Any], str]:
        folder = make_run(tmp_path / str(clients))
        counts = [[i, 10] for i in range(clients)]
        totals = [None if i else 7 for i in range(clients)]
        partition = {"classes": ["a", "b"], "train": counts, "test": totals}
        (folder / "partition.json").write_text(json.dumps(partition), "utf-8")
        text = write_report([read_run(folder)], folder / "r.html").read_text("utf-8")
        return charts_of(text), text

    few, text = page(200)
    ((labels,), _), ((moved,), _) = few["labels-train"]["0"], few["clients-uplink"]["all"]
    assert labels["z"] == [[i, 10] for i in range(200)]
    assert labels["customdata"][5] == ["client 5"] * 2
    assert len(moved["x"]) == 200
    many, longer = page(5001)
    ((labels,), _), ((moved,), _) = many["labels-train"]["0"], many["clients-uplink"]["all"]
    assert labels["y"][:3] == [0, 26, 52]
    assert labels["z"][0] == [12.5, 10]
    assert labels["customdata"][-1] == ["clients 4992 to 5000 on average"] * 2
    assert len(labels["z"]) == len(moved["x"]) == 193
    assert sum(moved["y"]) == pytest.approx(sum(few["clients-uplink"]["all"][0][0]["y"]) / 26)
    assert len(longer) < 1.2 * len(text)


def test_what_was_rounded_is_drawn_over_rounds(tmp_path: Path) -> None:
    plain, lossy = make_run(tmp_path / "a"), make_run(tmp_path / "b", "fedpurin", config='uplink_bits = "0.5"')
    rows = [json.loads(line) for line in (lossy / "rounds.jsonl").read_text("utf-8").splitlines()]
    for row in rows[1:]:  # as if in the first nothing had been
        row["measured"] = {"uplink bits a value": 0.5 + row["round"], "uplink rounding error": 0.125, "another": 1.0}
    rows[1]["measured"]["uplink rounding error"] = float("nan")  # which only a stranger's node says
    (lossy / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    runs = read_runs([plain, lossy])
    charts = charts_of(write_report(runs, tmp_path / "r.html").read_text("utf-8"))
    ((bits,), _), ((error,), layout) = (charts[f"rounded-{name}-uplink"]["all"] for name in ("bits", "error"))
    rounds = list(range(3, ROUNDS + 1))
    assert (bits["x"], bits["y"], error["y"]) == (rounds, [0.5 + t for t in rounds], [0.125] * len(rounds))
    assert layout["yaxis"]["title"] == "uplink rounding error"
    assert {trace["meta"] for trace in (bits, error)} == {1}  # the second of the runs
    assert said_below(runs) == ["uplink rounded: fedpurin to 5.00 bits per value, error 0.12"]
    assert "fedpurin (0.5 bits)" in list(summary_table(runs).columns[0].cells)[1]
    text = write_report(runs[:1], tmp_path / "r.html").read_text("utf-8")
    assert "rounded-bits-uplink" not in charts_of(text)
    assert "<h2>Rounding</h2>" not in text


def test_a_run_that_could_round_nothing_says_so(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "a", config="downlink_bits = 1.0")])
    assert said_below(runs) == ["downlink rounded: nothing, all values were sent in full"]


def test_scores_are_drawn_over_the_bytes_of_both_directions_and_of_each(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a"))
    charts = charts_of(write_report([run], tmp_path / "r.html").read_text("utf-8"))
    at = {over: charts[f"scores-{over}"]["accuracy server"][0][0]["x"] for over in ("both", "uplink", "downlink")}
    assert at["both"] == pytest.approx([up + down for up, down in zip(at["uplink"], at["downlink"], strict=True)])
    assert at["both"][-1] * 1e6 == pytest.approx(ledger_sum(run.path, "bytes_up") + ledger_sum(run.path, "bytes_down"))


def test_what_was_reached_is_drawn_over_simulated_seconds_where_there_are_any(tmp_path: Path) -> None:
    plain, timed = make_run(tmp_path / "a"), make_run(tmp_path / "b", "fedbuff")
    rows = [json.loads(line) for line in (timed / "rounds.jsonl").read_text("utf-8").splitlines()]
    for row in rows:
        row["simulated_seconds"] = 2.5 * row["round"]
    (timed / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    runs = read_runs([plain, timed])
    text = write_report(runs, tmp_path / "r.html").read_text("utf-8")
    ((trace,), _) = charts_of(text)["scores-seconds"]["global"]
    assert trace["x"] == [2.5 * t for t in range(1, ROUNDS + 1)]
    assert trace["y"] == [row["scores"]["accuracy"]["global"] for row in rows]
    assert said_below(runs) == [f"by the simulated clock: fedbuff {2.5 * ROUNDS} s"]
    text = write_report(runs[:1], tmp_path / "r.html").read_text("utf-8")
    assert "scores-seconds" not in charts_of(text)
    assert "simulated" not in text


def test_images_stand_by_class_and_round(tmp_path: Path) -> None:
    run = read_run(show(make_run(tmp_path / "a"), range(1, ROUNDS + 2), ["cat", "dog", "cat"]))
    text = write_report([run], tmp_path / "r.html").read_text("utf-8")
    images = shown_images(text)
    times = [*(f"round {t}" for t in range(1, ROUNDS + 1)), "at the end"]
    assert list(images) == [f"{label}, {when}" for label in ("cat", "dog") for when in times]
    for t, when in enumerate(times, 1):
        for label, width in (("cat", 16), ("dog", 8)):
            image = images[f"{label}, {when}"]
            assert (image.mode, image.size, image.getextrema()) == ("L", (width, 8), (t, t))
    assert text.count('width="128" height="64"') == text.count('width="64" height="64"') == len(times)
    assert "the rest is in the run's folder" not in text


def test_many_rounds_are_thinned_and_so_are_classes_where_bytes_are_few(tmp_path: Path, monkeypatch: Any) -> None:
    run = read_run(show(make_run(tmp_path / "a"), range(2, 41, 2), [f"class {i}" for i in range(30)]))
    without = write_report([read_run(make_run(tmp_path / "b"))], tmp_path / "r.html").stat().st_size
    text = write_report([run], tmp_path / "r.html").read_text("utf-8")
    images = shown_images(text)
    assert len(images) == 12 * 30
    assert {"class 0, round 2", "class 29, round 40"} < set(images)
    assert "Shown: 12 of 20 rounds" in text
    monkeypatch.setattr(pictures, "_BYTES", 30_000)
    text = write_report([run], tmp_path / "r.html").read_text("utf-8")
    images = shown_images(text)
    assert {"class 0, round 2", "class 29, round 40"} < set(images)
    assert 16 <= len(images) < 12 * 30
    assert len(text) < without + 30_000 + 5_000
    monkeypatch.setattr(pictures, "_BYTES", 100)
    text = write_report([run], tmp_path / "r.html").read_text("utf-8")
    assert not shown_images(text)
    assert "<code>2-map.json</code>" in text


def test_points_have_a_chart_a_panel_and_a_view_a_round(tmp_path: Path) -> None:
    run = read_run(show(make_run(tmp_path / "a", classes=("cat", "dog")), range(1, 4)))
    text = write_report([run], tmp_path / "r.html").read_text("utf-8")
    before, after = (charts_of(text)[f"map-0-{i}"] for i in range(2))
    assert list(before) == list(after) == ["1", "2", "3"]
    assert [len(view[0]) for view in after.values()] == [2, 2, 2]
    kept = json.loads((tmp_path / "a" / "gallery" / "2-map.json").read_text("utf-8"))["before"]["prototypes"]
    trace = before["2"][0][0]
    assert (trace["x"], trace["y"]) == (kept["x"], kept["y"])
    assert trace["text"] == ["cat", "dog", "class 2", "cat"]
    assert len(set(trace["marker"]["color"])) == 3
    grey = after["2"][0][0]  # below the others
    assert ("text" in grey, grey["marker"]["symbol"]) == (False, "diamond-open")
    assert [value for tag, attrs in Page(text).tags if (value := attrs.get("name")) == "map-0"] == ["map-0"] * 3


def test_pictures_of_several_runs_are_named_by_the_run(tmp_path: Path) -> None:
    folder = make_compare(tmp_path / "c")
    assert "Pictures" not in write_report(read_runs([folder]), tmp_path / "r.html").read_text("utf-8")
    show(folder / "1-fedavg", [1])
    show(folder / "3-fedktl", [1, 2])
    text = write_report(read_runs([folder]), tmp_path / "r.html").read_text("utf-8")
    assert re.findall("<h3>(.*)</h3>", text) == ["fedavg: Made", "fedavg: Map", "fedktl: Made", "fedktl: Map"]
    assert len(shown_images(text.split("<h3>fedktl: Made")[1])) == 4


def show_shares(folder: Path, t: int, rows: dict[str, dict[str, torch.Tensor]]) -> Path:
    gallery.keep(folder, t, {"active.shares.json": gallery.Shares(rows).drawn()})
    return folder


def test_shares_are_drawn_by_layer_as_ridges_and_a_heat_map(tmp_path: Path) -> None:
    clients = {f"client {i}": {"conv": torch.full((3, 3), i / 30), "fc": torch.arange(2600) / 2600} for i in range(30)}
    folder = show_shares(make_run(tmp_path / "a"), 1, {"client 0": {"old": torch.zeros(1)}})
    show_shares(folder, ROUNDS + 1, clients | {"server": {"conv": torch.ones(9), "fc": torch.ones(2600)}})
    text = write_report([read_run(folder)], tmp_path / "r.html").read_text("utf-8")
    assert re.findall("<h3>(.*)</h3>", text) == ["Active"]
    assert re.findall('<input type="radio" name="active-0-shares".*?<span>(.*?)</span>', text) == ["conv", "fc"]
    assert "Shown: 21 of 31 rows as ridges, 9 of 31 rows of the heat map" in text
    assert "With more than 1,280 elements" in text
    ridges, heat = (charts_of(text)[f"active-0-shares-{kind}"] for kind in ("ridges", "heat"))
    traces, layout = ridges["0"]
    assert [trace["text"].split("<")[0] for trace in traces] == layout["yaxis"]["ticktext"]
    assert (layout["yaxis"]["ticktext"][0], layout["yaxis"]["ticktext"][-1]) == ("client 0", "server")
    for place, trace in zip(layout["yaxis"]["tickvals"], traces, strict=True):
        assert trace["y"][0] == trace["y"][-1] == min(trace["y"]) == place
    assert [trace["x"][max(range(103), key=trace["y"].__getitem__)] for trace in (traces[0], traces[-1])] == [0, 1]
    (small,), (large,) = heat["0"][0], heat["1"][0]
    assert (len(small["z"]), small["z"][-1], small["z"][0]) == (9, [1.0] * 9, [0.0] * 9)
    assert (large["x"][:3], large["z"][0][0]) == ([0, 3, 6], round(1 / 2600, 3))
    assert len(large["x"]) == len(large["z"][0]) == 867


@pytest.mark.parametrize(
    "values", [[0.0], [1.0] * 7, [0.0, 1.0], [0.5, 0.50001], np.linspace(0, 1, 9), np.arange(200) / 199]
)
def test_ridges_hold_all_elements(values: Any) -> None:
    heights = activations.density(np.array(values))
    assert np.trapezoid(heights, dx=0.01) == pytest.approx(1, abs=0.01)
    assert (heights >= 0).all()


DAMAGED_SHARES = [
    b"{}",
    b'{"server": {"fc": [0, 1.5]}}',
    b'{"server": {"fc": [0, NaN]}}',
    b'{"server": {"fc": [0, 1]}, "client 0": {"fc": [0]}}',
    b'{"server": {"fc": []}}',
    b'{"server": [1]}',
    b"[" * 100_000,
]


def test_shares_that_are_damaged_or_do_not_fit_are_left_out_with_a_word(tmp_path: Path, monkeypatch: Any) -> None:
    folder = show_shares(make_run(tmp_path / "a"), 2, {"server": {"fc": torch.ones(9)}})
    for number, data in enumerate(DAMAGED_SHARES):
        (folder / "gallery" / f"2-damaged-{number}.shares.json").write_bytes(data)
    text = write_report([read_run(folder)], tmp_path / "r.html").read_text("utf-8")
    assert re.findall("<h3>(.*)</h3>", text) == ["Active"]
    assert "<code>2-damaged-0.shares.json</code>, " in text
    assert f" and {len(DAMAGED_SHARES) - 5} more.</p>" in text
    monkeypatch.setattr(pictures, "_BYTES", 100)
    text = write_report([read_run(folder)], tmp_path / "r.html").read_text("utf-8")
    assert "<h3>" not in text
    assert f" and {len(DAMAGED_SHARES) + 1 - 5} more.</p>" in text


def test_shares_are_coarser_where_bytes_are_few(tmp_path: Path, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    layers = {f"layer {i}": torch.rand(1000) for i in range(12)}
    run = read_run(show_shares(make_run(tmp_path / "a"), 2, {f"client {i}": layers for i in range(4)}))
    shown = {}
    for most in (2_000_000, 250_000, 60_000):
        monkeypatch.setattr(pictures, "_BYTES", most)
        text = write_report([run], tmp_path / "r.html").read_text("utf-8")
        charts = {name: views for name, views in charts_of(text).items() if name.startswith("active")}
        assert len(json.dumps(charts, separators=(",", ":"))) <= most
        heat = charts["active-0-shares-heat"]
        shown[most] = (len(heat), len(heat["0"][0][0]["x"]))
    assert shown == {2_000_000: (12, 1000), 250_000: (12, 500), 60_000: (4, 143)}
    assert "Shown: 4 of 12 layers" in text
    assert "With more than 160 elements" in text


def png(size: tuple[int, int] = (8, 8), mode: str = "L", told: str | None = None) -> bytes:
    text, file = PngImagePlugin.PngInfo(), io.BytesIO()
    if told is not None:
        text.add_itxt(gallery.ROWS, told)
    Image.new(mode, size).save(file, "PNG", pnginfo=text)
    return file.getvalue()


DAMAGED = {
    "1-a.png": b"<script>",
    "1-b.png": png(told='{"cat": 1}')[:-30],
    "1-c.png": png(),
    "1-d.png": png(told='{"cat": 0}'),
    "1-e.png": png(told='{"cat": 9}'),
    "1-f.png": png((600, 600), told='{"cat": 1}'),
    "1-g.png": png(mode="P", told='{"cat": 1}'),
    "1-h.png": png(told="{}"),
    "1-i.png": b"GIF89a",
    "1-j.json": b"{",
    "1-k.json": b'{"p": [1]}',
    "1-l.json": b'{"p": {"s": {"x": [1], "y": [1, 2], "classes": null}}}',
    "1-m.json": b'{"p": {"s": {"x": [1], "y": [1], "classes": []}}}',
    "1-n.json": b'{"p": {"s": {"x": [1e999], "y": [1], "classes": null}}}',
    "1-o.json": b'{"p": {"s": {"x": [1], "y": [1], "classes": [1' + b"0" * 5000 + b"]}}}",
    "1-p.json": b"[" * 100_000,
    "1-<img src=x>.png": b"",
    "no-round.png": b"",
}


def test_damaged_pictures_are_left_out_with_a_word(tmp_path: Path, monkeypatch: Any) -> None:
    folder = show(make_run(tmp_path / "a"), [2])
    for name, data in DAMAGED.items():
        (folder / "gallery" / name).write_bytes(data)
    (folder / "gallery" / "3-made.png").mkdir()
    (folder / "gallery" / ".4-made.png.1.tmp").write_bytes(b"")  # left by a killed run
    text = write_report([read_run(folder)], tmp_path / "r.html").read_text("utf-8")
    assert len(shown_images(text)) == 2
    assert re.findall("<h3>(.*)</h3>", text) == ["Made", "Map"]
    assert "<code>1-&lt;img src=x&gt;.png</code>, " in text
    assert f" and {len(DAMAGED) + 1 - 5} more.</p>" in text
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60)  # what decodes to very much
    assert not shown_images(write_report([read_run(folder)], tmp_path / "r.html").read_text("utf-8"))


def test_nothing_to_report_and_nowhere_to_write_are_the_users_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs"):
        write_report([], tmp_path / "r.html")
    run = read_run(make_run(tmp_path / "a"))
    with pytest.raises(UserError, match="cannot be written"):
        write_report([run], tmp_path / "a" / "config.toml" / "r.html")


# ---- the page in a browser ----


def browse(page: Path, profile: Path) -> tuple[str, str, list[str]]:
    """The document after its scripts ran, what the console said, and what the page asked of a network."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here to look at the page with")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --disable-default-apps --virtual-time-budget=5000 --dump-dom"
    flags += " --enable-logging=stderr --v=0"
    net = profile / "net.json"
    profile.mkdir()
    done = subprocess.run(
        [
            chromium,
            *flags.split(),
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
            f"--log-net-log={net}",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    mine = re.compile(r'"initiator":"(?!not an origin").*"url":"(https?|wss?):')  # the others are the browser's own
    asked = [line for line in net.read_text("utf-8").splitlines() if mine.search(line)]
    return done.stdout, done.stderr, asked


def test_the_watch_on_the_browser_would_notice(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://evil.test/x"><script>throw 1</script>')
    _, console, asked = browse(page, tmp_path / "profile")
    assert "Uncaught" in console
    assert asked


def test_a_browser_draws_every_chart_and_nothing_hostile_runs(tmp_path: Path) -> None:
    config = f"method = 'x'\n# {HOSTILE}\n"
    folder = make_compare(tmp_path / "c")
    make_run(folder / "4", HOSTILE, ("global", HOSTILE), 5_000, classes=(HOSTILE, HOSTILE, "2"), config=config)
    show(folder / "4", [1, 2], (HOSTILE, "dog"), HOSTILE)
    show_shares(folder / "4", 1, {row: {HOSTILE: torch.rand(5), "fc": torch.ones(3)} for row in (HOSTILE, "server")})
    (folder / "4" / "gallery" / f"1-{HOSTILE.replace('/', '')}.png").write_bytes(b"")
    page = write_report(read_runs([folder]), tmp_path / "r.html")
    dom, console, asked = browse(page, tmp_path / "profile")
    assert "Uncaught" not in console
    assert "Refused" not in console
    assert "violates" not in console
    assert asked == []
    tags = Page(dom).tags
    images = [str(attrs["src"]) for tag, attrs in tags if tag == "img"]
    assert [image[:22] for image in images] == ["data:image/png;base64,"] * 4
    assert not [attrs for _, attrs in tags if "onerror" in attrs]
    assert "<title>1</title>" not in dom
    assert dom.count('class="main-svg"') >= 9
    assert dom.count('class="trace scatter') == 2 * 4 + 3 * 4 + 3 + 2  # charts of accuracy, bytes, points, shares
    assert dom.count('class="trace boxes"') == 2 * 4
    assert dom.count('class="hm"') == 2 + 1


def test_a_browser_draws_a_single_run(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "a", "fedpurin", ("sparse", "personalised", "combined"), phases=True))
    dom, console, asked = browse(write_report([run], tmp_path / "r.html"), tmp_path / "profile")
    assert "Uncaught" not in console
    assert asked == []
    assert dom.count('class="trace scatter') == 3 * 4 + 2
    assert dom.count('class="trace bars"') == 2


def test_every_table_sorts_and_filters_but_a_baseline_stays(tmp_path: Path) -> None:
    left = [(1, client, "train", "late" if client % 2 else "rejected") for client in range(7)]
    runs = [read_run(make_run(tmp_path / f"{seed}", seed=seed)) for seed in range(6)]
    for number, run in enumerate(runs):
        run.result["parameters"] = {"lr": number}  # a row each
    runs.append(read_run(leave_out(make_run(tmp_path / "a"), *left, (2, 2, "train", "unreachable"))))
    page = write_report(runs, tmp_path / "r.html")
    asked = """<script>
    for (const field of document.querySelectorAll(".filter input")) { field.value = "late"; field.oninput(); }
    const table = document.querySelector("[aria-label^='Clients left out'] table");
    table.querySelectorAll("thead button")[1].click();
    for (const row of document.querySelectorAll(".baseline")) console.log("baseline", row.hidden);
    const shown = [...table.tBodies[0].rows].filter((row) => !row.hidden);
    console.log("clients", shown.map((row) => row.cells[1].textContent).join(" "), table.className);
    console.log("numbers", document.querySelectorAll(".numbers thead button, .numbers .filter").length);
    </script>"""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text("utf-8"))
    page.write_text(text.replace("</body>", f"{asked}</body>"), "utf-8")
    _, console, _ = browse(page, tmp_path / "profile")
    assert "Uncaught" not in console
    assert '"baseline false"' in console
    assert '"baseline true"' not in console
    assert '"clients 5 3 1 narrow"' in console
    assert '"numbers 0"' in console
