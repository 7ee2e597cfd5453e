"""Documents count bytes of both directions: tables have totals, factors a reference; advice follows the tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = ("README.md", "docs/**/*.md", "examples/**/*.md", "examples/**/*.py", "benchmarks/**/*.py")
PLACES += ("src/fewbytes/**/*.py", "src/fewbytes/**/*.html")
FILES = sorted({path for place in PLACES for path in ROOT.glob(place)})
REFERENCE = re.compile(r"times fewer bytes (?:up )?than \S")
FRACTION = re.compile(
    r"\ban? (?:half|third|quarter|fifth|tenth|twentieth|fiftieth|hundredth) of the (?:bytes|uplink)\b(?! of)"
)
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def unexplained(text: str) -> list[str]:
    """Where "times fewer" does not name the bytes that it counts and what they are fewer than, or "a tenth of the
    bytes" does not say whose."""
    text = re.sub(r"\s+", " ", text)
    return [
        text[at : at + 60]
        for at in (m.start() for m in re.finditer("times fewer", text))
        if not REFERENCE.match(text, at)
    ] + FRACTION.findall(text)


def tables(text: str) -> Iterator[list[dict[str, str]]]:
    """The rows of a document's tables, by head; the first of equal heads counts."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        heads, _, *rows = [
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])] for line in block.splitlines()
        ]
        yield [dict(reversed(list(zip(heads, row, strict=True)))) for row in rows]


def rounding(number: str) -> float:
    """How far a printed number may be from what it rounds."""
    return 0.5 * 10.0 ** -len(number.partition(".")[2])


def test_times_fewer_names_what_is_compared():
    """A factor without its reference could be of either direction, and against anything."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in FILES}
    assert not {name: found for name, text in texts.items() if (found := unexplained(text))}
    assert sum("times fewer" in text for text in texts.values()) > 10


def test_a_factor_without_reference_is_found():
    assert unexplained("| MB up | times fewer |")
    assert unexplained("It sends 47 times fewer\nbytes.")
    assert unexplained("It learns as well at a tenth\nof the bytes.")
    assert not unexplained("It learns as well at a tenth of FedAvg's bytes, or a tenth of the bytes of FedAvg.")
    assert not unexplained("It moves 47 times fewer\nbytes than before, 50 times fewer bytes up than before.")


def test_tables_of_both_directions_have_their_total():
    counted = 0
    for path in (path for path in FILES if path.suffix == ".md"):
        for row in (row for table in tables(path.read_text("utf-8")) for row in table):
            units = [unit for unit in ("MB", "kB") if {f"{unit} up", f"{unit} down"} <= row.keys()]
            found = [[row.get(f"{unit} {way}") for way in ("up", "down", "both")] for unit in units]
            assert not found or any(both is not None for _, _, both in found), f"{path.name}: {row}"
            for up, down, both in (each for each in found if NUMBER.fullmatch(each[2] or "")):
                apart = abs(float(up) + float(down) - float(both))
                assert apart <= sum(map(rounding, (up, down, both))) + 1e-9, f"{path.name}: {row}"
                counted += 1
    assert counted > 100


FACTOR = "times fewer bytes than fedavg, both"
PLAIN = {"fedcom, 8 bits": "`fedcom` moves", "fedavg, 0.5 bits": "`--bits 0.5` moves"}


def test_the_advice_on_fewer_bytes_follows_the_tables():
    """docs/which.md's step 5 recommends rounding; papers' ways to send less are its baselines."""
    text = (ROOT / "docs" / "which.md").read_text("utf-8")
    step = re.sub(r"\s+", " ", re.findall(r"^5\. \*\*.*?(?=\n\n)", text, re.M | re.S)[0])
    advice, baselines = step.split("Papers' ways to send less")
    assert "take `--bits 0.5`" in advice
    names = re.findall(r"`(\w+)`", baselines.partition(" are baselines for ")[0])
    assert sorted(names) == ["dgc", "fedcams", "fedcom", "smartidx"]
    assert not set(names) & set(re.findall(r"`(\w+)`", advice))
    rows = {re.findall(r"\[`(\w+)`\]", row["method"])[0]: row for table in tables(text) for row in table}
    least = float(re.findall(r"at least ([\d.]+) MB down", baselines)[0])
    assert all(float(rows[name]["MB down"]) >= least for name in names)
    assert float(rows["fedavg"]["MB down"]) >= least
    assert all(float(rows[name]["MB up"]) < float(rows["fedavg"]["MB up"]) for name in names)
    lossy = [*tables((ROOT / "docs" / "lossy.md").read_text("utf-8"))]
    measured = [{row[""]: row for row in table} for table in lossy if "bytes a reply" in table[0]]
    assert len(measured) >= 3
    dgc = [rows["dgc"]["rounds"] for rows in measured if "dgc" in rows]
    assert dgc
    assert {*dgc} == {"not reached"}
    outer = "fedavg, outer step, 0.3 bits"
    again = {row[FACTOR]: row for table in lossy if FACTOR in table[0] and "" not in table[0] for row in table}
    for name, words in ((outer, "`--bits 0.3` reaches it in all tables, and moves"), *PLAIN.items()):
        stated = re.findall(rf"{words} ([\d.]+) to ([\d.]+) times fewer", step)[0]
        digits = len(stated[0].partition(".")[2])
        reached = [rows[name] for rows in measured if name in rows and rows[name]["rounds"] != "not reached"]
        factors = [float(row[FACTOR]) for row in reached]
        factors += [float(cell) for cell in again[name].values() if NUMBER.fullmatch(cell)]
        assert [f"{factor:.{digits}f}" for factor in (min(factors), max(factors))] == [*stated]
    assert all(rows[outer]["rounds"] != "not reached" for rows in measured if outer in rows)
    assert "not reached" not in again[outer].values()
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text("utf-8"))
    assert re.findall(r"`--bits 0.3`\]\(\S+\) moves ([\d.]+) to ([\d.]+) times fewer", readme) == re.findall(
        r"in all tables, and moves ([\d.]+) to ([\d.]+) times fewer", step
    )
