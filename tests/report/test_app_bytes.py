"""The report of somebody else's Flower app."""

from __future__ import annotations

import json

import pytest
from commands import fewbytes

from fewbytes.base.errors import UserError
from fewbytes.report.app_bytes import read_app_bytes, write_app_report

ROWS = [
    {"round": str(t), "kind": "train", "node": f"{n}", "way": way, "bytes": 100_000 * t, "plain": 1_000_000}
    for t in (1, 2)
    for n in (11, 12)
    for way in ("down", "up")
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "bytes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def test_bytes_are_added_by_round_and_direction(folder):
    counted = read_app_bytes(folder)
    assert (counted.rounds, counted.nodes) == (["1", "2"], 2)
    assert counted.sent == {"up": [200_000, 400_000], "down": [200_000, 400_000]}
    assert counted.totals()["total"] == (1_200_000, 8_000_000)


def test_the_report_shows_both_directions_and_the_total(folder):
    page = write_app_report(folder).read_text()
    assert page.count("Bar chart of") == 2
    assert "6.67" in page
    assert "times fewer bytes than plain" in page


def test_the_command_writes_it(folder):
    done = fewbytes("report", folder)
    assert done.returncode == 0
    assert "total: 1.20 MB sent, 8.00 MB plain, 6.67 times fewer bytes than plain" in done.stdout
    assert (folder / "report.html").exists()


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", '{"way": "up"}', json.dumps(ROWS[0] | {"bytes": -1}), json.dumps(ROWS[0] | {"way": "<b>"}),
     json.dumps(ROWS[0] | {"round": 7}), json.dumps(ROWS[0] | {"bytes": 1e400})],
)  # fmt: skip
def test_a_line_that_is_damaged_is_named(folder, line):
    with (folder / "bytes.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match="line 9"):
        read_app_bytes(folder)


def test_a_file_without_messages_says_so(tmp_path):
    (tmp_path / "bytes.jsonl").touch()
    done = fewbytes("report", tmp_path)
    assert done.returncode == 2
    assert "no message yet" in done.stderr


def test_text_of_the_file_cannot_become_code(folder):
    rows = [row | {"round": "<script>alert(1)</script>"} for row in ROWS]
    (folder / "bytes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "<script>alert" not in write_app_report(folder).read_text()
