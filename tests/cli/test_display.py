"""What is said of a run where there is no terminal."""

from __future__ import annotations

import pytest

from fewbytes.experiments.display import Display


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
