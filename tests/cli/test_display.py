"""What is said of a run where there is no terminal."""

from __future__ import annotations

import io
import sys

import pytest

from fewbytes.base.encoded import out_of
from fewbytes.base.errors import UserError
from fewbytes.base.units import in_unit, moved, unit_of
from fewbytes.experiments.compare import compare
from fewbytes.experiments.display import PLAIN, Display, Visible
from fewbytes.report.pieces import axis_unit


@pytest.mark.parametrize(("command", "told"), [("deploy", range(1, 13)), ("run", (1, 2, 4, 6, 8, 10, 12))])
def test_a_log_has_a_line_for_what_is_waited_for_and_of_a_deployment_for_each_round(command, told, tmp_path, capsys):
    with Display("fedavg", tmp_path, command) as display:
        for there in (0, 2):
            display.waiting(there, 3)
        display.started(tmp_path, 12, 0)
        for t in range(1, 13):
            display.replied(0)
            display.moved(t * 1_000_000, t * 2_000_000)
            scores = {"accuracy": {"global": t / 100}} if t % 4 == 0 else {}
            display.scored({"phase": "round", "round": t, "scores": scores})
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert lines[:2] == [f"fedavg: waiting for clients: {there} of 3 are connected" for there in (0, 2)]
    rounds = [line for line in lines if line.startswith("fedavg: round ")]
    assert [line.split()[2] for line in rounds] == [f"{t}/12" for t in told]
    assert rounds[-1].split("  ")[1:] == ["global 12.0%", "36.0 MB (12.0 up, 24.0 down)"]


def test_a_line_names_each_metric_once(tmp_path, capsys) -> None:
    with Display("fedavg", tmp_path) as display:
        display.started(tmp_path, 1, 0)
        scores = {"accuracy": {"global": 0.1, "personalised": 0.2}, "f1": {"global": 0.3, "personalised": 0.4}}
        display.scored({"phase": "round", "round": 1, "scores": scores})
    words = "accuracy: global 10.0%  personalised 20.0%  f1: global 30.0%  personalised 40.0%"
    assert f"fedavg: round 1/1  {words}  0 MB" in capsys.readouterr().err


def test_a_narrow_line_keeps_the_bytes(tmp_path) -> None:
    display = Display("fedpurin", tmp_path)
    display.moved(12_000_000, 24_000_000)
    display.scored({"phase": "round", "round": 1, "scores": {"accuracy": {"global": 0.1}, "f1": {"global": 0.3}}})
    texts = [display._text(1, room) for room in (90, 70, 40, 20)]
    assert [text.count("36.0 MB") for text in texts] == [1, 1, 1, 1]
    assert [text.count("(12.0 up, 24.0 down)") for text in texts] == [1, 1, 0, 0]


def test_lines_end_between_words_on_a_terminal_and_are_whole_elsewhere() -> None:
    text = "For personalised models, use separate, with nothing sent: see runs/20261129-110655-compare/report.html"
    for terminal in (True, False):
        file = io.StringIO()
        Visible(file=file, force_terminal=terminal, width=50, **PLAIN).print(text, soft_wrap=True)
        lines = file.getvalue().splitlines()
        assert " ".join(map(str.strip, lines)) == text
        assert (len(lines) > 2) == terminal


@pytest.mark.parametrize(
    ("counts", "unit", "texts"),
    [
        ([14_400, None, 0], "kB", ["14.4", "—", "0"]),
        ([923_000, 1_600_000], "kB", ["923", "1,600"]),
        ([460, 677_000, 1_600_000], "kB", ["0.460", "677", "1,600"]),
        ([12_000_000, 24_000_000], "MB", ["12.0", "24.0"]),
        ([180], "B", ["180"]),
        ([1, 900_000_000], "kB", ["0.00100", "900,000"]),
    ],
)
def test_one_unit_suits_all_amounts_of_a_table(counts: list[int | None], unit: str, texts: list[str]) -> None:
    assert unit_of(counts) == unit
    assert [in_unit(count, unit) for count in counts] == texts


def test_a_missing_package_is_said_once_for_all_methods_of_a_comparison(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    table = tmp_path / "numbers.csv"
    table.write_text("a,target\n" + "".join(f"{i * 37 % 61},{i / 7}\n" for i in range(60)))
    with pytest.raises(UserError, match="metric mae needs torchmetrics"):
        compare(["fedavg", "fedper", "separate"], {"dataset": str(table), "clients": 2}, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    assert "torchmetrics" not in capsys.readouterr().err


def test_bytes_of_each_way_name_their_unit_where_it_differs() -> None:
    assert moved(923_000, 677_000) == "1.60 MB (923 kB up, 677 kB down)"
    assert moved(5, 0) == "5 B (5 up, 0 down)"
    assert moved(0, 0) == "0 MB (0 up, 0 down)"
    assert out_of(34_100, 1_990_000) == "34.1 kB of 1.99 MB"
    assert out_of(4_420, 248_000) == "4.42 of 248 kB"
    assert out_of(0, 1_990_000) == "0 of 1.99 MB"


def test_an_axis_of_small_amounts_has_kilobytes() -> None:
    assert [axis_unit(counts) for counts in ([99_000, 0], [100_000, 1], [0], [])] == ["kB", "MB", "MB", "MB"]
