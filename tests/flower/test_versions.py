"""Versions of software that differ between a server and its nodes."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: no handshake", exc_type=ImportError)

from fewbytes.flower.versions import FRAMES, compared, differing, packed, refusal, series, unpacked, versions, words_of


def test_equal_versions_agree_in_silence():
    assert refusal(unpacked(packed())) == ""
    assert differing(unpacked(packed())) == differing({}) == {}
    assert words_of(compared({})) == ""


@pytest.mark.parametrize("of", [{"fewbytes": "0.1.7"}, {FRAMES: "99"}])
def test_a_series_or_a_format_that_differs_is_refused_with_both_versions(of):
    ours, theirs = versions(), versions() | of
    why = refusal(theirs)
    for words in (ours["fewbytes"], ours[FRAMES], theirs["fewbytes"], theirs[FRAMES], "install the same version"):
        assert words in why
    assert "\n" not in why


def test_what_may_differ_is_named():
    same = f"{series(versions()['fewbytes'])}.999"
    theirs = versions() | {"torch": "2.0.1", "fewbytes": same, "python": "3.99.1"}
    assert refusal(theirs) == ""
    assert differing(theirs) == {name: versions()[name] for name in ("torch", "fewbytes", "python")}
    words = words_of(compared({name: theirs[name] for name in differing(theirs)}))
    assert f"torch 2.0.1 there, {versions()['torch']} here" in words
    assert f"fewbytes {same} there" in words
    assert "python 3.99.1 there" in words
    assert "flwr" not in words


@pytest.mark.parametrize("frame", [b"", b"\xff", b"[]", b'{"fewbytes": 3}'])
def test_a_server_that_sends_no_versions_is_not_refused_for_it(frame):
    assert refusal(unpacked(frame)) == ""


def test_what_the_other_end_sends_steers_no_terminal():
    hostile = "0.1\x1b[2J\n" + "x" * 10_000
    assert all(
        text.isprintable() and len(text) < 400
        for text in (refusal({"fewbytes": hostile, FRAMES: hostile}), words_of(compared({"torch": hostile})))
    )
