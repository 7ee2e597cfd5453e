"""What an engine takes of a run, from its settings."""

from __future__ import annotations

from pathlib import Path

from fewbytes.engines.terms import Terms
from fewbytes.running.run import Run


def terms_of(run: Run, folder: Path) -> Terms:
    """The terms of a run in a folder."""
    problem, how = run.task.problem, run.settings
    seconds = None if how.speeds is None else how.speeds.seconds(len(problem.clients), problem.seed)
    return Terms(
        run.method, run.task, folder, run.policy, how.coded, how.keep_frames, how.uplink(), how.downlink(), seconds
    )
