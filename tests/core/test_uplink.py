"""What is picked for each client's replies by what its link moves."""

from __future__ import annotations

import pytest
from cases import tiny_task

import fewbytes as fb
from fewbytes.base.errors import UserError
from fewbytes.core.uplink import CHOSEN, FIRST, Uplink, UplinkBits


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (0.5, "0.5"),
        (8, "8"),
        ("1.25", "1.25"),
        ("auto", "auto"),
        ("auto=1MB/s", "auto=1000000B/s"),
        ("auto=8Mbit/s", "auto=1000000B/s"),
    ],
)
def test_what_is_written_is_read_again(text, written):
    made = UplinkBits.read(text)
    assert str(made) == written
    assert UplinkBits.read(written) == made


@pytest.mark.parametrize("text", ["", "0.05", 17, "some", "auto=", "auto=fast", "nan", "automatic"])
def test_what_is_no_number_of_bits_is_refused(text):
    with pytest.raises(UserError):
        UplinkBits.read(text)


def test_a_reply_moves_in_the_time_that_it_took_to_make():
    uplink = Uplink(UplinkBits.read("auto=100kB/s"))
    assert uplink.rate(3).bits == FIRST
    uplink.observe(3, seconds=2.0, values=1_000_000, rate=None)
    assert uplink.rate(3).bits == pytest.approx(8 * 100_000 * 2.0 / 1_000_000)
    assert uplink.rate(4).bits == FIRST  # of others nothing is known
    uplink.observe(3, seconds=2000.0, values=1_000_000, rate=None)
    assert uplink.rate(3).bits == CHOSEN[1]
    uplink.observe(4, seconds=0.001, values=1_000_000, rate=None)
    assert uplink.rate(4).bits == CHOSEN[0]


def test_links_that_differ_are_told_apart_where_they_are_measured():
    uplink = Uplink(UplinkBits.read("auto"))
    for client, rate in ((0, 1e6), (1, 1e5)):
        uplink.observe(client, seconds=1.0, values=4_000_000, rate=None)
        assert uplink.rate(client).bits == FIRST  # its link is not known
        uplink.observe(client, seconds=1.0, values=4_000_000, rate=rate)
    assert (uplink.rate(0).bits, uplink.rate(1).bits) == (pytest.approx(2.0), CHOSEN[0])


def test_what_is_fixed_stays_whatever_is_measured():
    for uplink in (Uplink(UplinkBits.read(0.5)), Uplink(step=2.0), Uplink()):
        before = uplink.rate(0)
        uplink.observe(0, seconds=1.0, values=100, rate=10.0)
        assert (uplink.rate(0), uplink.picks) == (before, False)


def test_what_cannot_be_is_passed_over():
    uplink = Uplink(UplinkBits.read("auto=1MB/s"))
    for seconds, values in ((float("nan"), 10), (float("inf"), 10), (-1.0, 10), (1.0, -5), (1.0, 0)):
        uplink.observe(0, seconds, values, rate=None)
        assert uplink.rate(0).bits == FIRST


def test_a_run_says_what_was_picked(tmp_path):
    result = fb.run(fb.FedAvg(), tiny_task(), rounds=3, workers=1, uplink_bits="auto=20kB/s", out=tmp_path)
    notes = [note for row in result.rounds for note in row["notes"].items()]
    assert len(notes) == 3
    assert all(what.startswith("clients sent what their links move") for what, _ in notes)
    picked = [row["measured"]["uplink bits a value"] for row in result.rounds]
    assert picked[-1] != pytest.approx(picked[0], rel=0.05)  # 2 at first, then by what is measured
