"""What `deploy` needs to know of its run, found out in a process of its own, which ends: it imports torch, which takes
300 MB, and `deploy` stays for as long as the run.

`python -m fewbytes.cli.planned` reads a Question from standard input and writes the Answer to the file descriptor that
its argument names, both as JSON.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import Any, TextIO, cast

import msgspec

from fewbytes.base.errors import FewbytesError, UserError
from fewbytes.cli.endings import ending
from fewbytes.cli.shared import naming, standard_output_for
from fewbytes.experiments.hosts import Settled, settled
from fewbytes.experiments.membership import places_for
from fewbytes.experiments.places import Nodes, Place, host_names, places, remembered
from fewbytes.federation.members import read as read_federation
from fewbytes.flower.dated_lines import DatedLines

BY_MAILBOX_SECONDS = 14 * 86400.0  # default of --round-timeout with --mailbox: files may travel by post
PACKAGE = str(Path(__file__).parents[2])


class Question(msgspec.Struct):
    """What `deploy` was asked for: the settings given, and `hosts`, `address`, `listen`, `node`, `federation`,
    `mailbox` and `by_mailbox`."""

    settings: dict[str, Any]
    where: dict[str, str | None]
    resume: Path | None = None
    from_round: int | None = None
    allow: str | None = None
    as_json: bool = False


class Planned(msgspec.Struct):
    """A checked run, for its deployment: plain values.

    The method's name, its short one, and the kind of score in the live line; the command that resumes the run; notes
    for the user; the settings as given, as a config, and as the deployment needs them; a place per client, and the
    options that led to them; whether the run resumes.
    """

    method: str
    name: str
    headline: str
    resuming: str
    notes: list[str]
    asked: str
    settled: Settled
    nodes: list[Place]
    where: dict[str, str | None]
    again: bool


class Answer(msgspec.Struct):
    """The plan, or the error: its text, and whether it is the user's."""

    plan: Planned | None = None
    error: str = ""
    mine: bool = False


def planned(question: Question) -> Planned:
    """The plan of a deployment, its settings checked. Raises UserError for all mistakes in them, SystemExit if the
    process fails otherwise, after it has printed why."""
    back, there = os.pipe()
    command = [sys.executable, "-P", "-m", __name__, str(there)]
    path = os.pathsep.join(filter(None, [PACKAGE, os.environ.get("PYTHONPATH")]))
    with (
        os.fdopen(back, "rb") as answers,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[there], env={**os.environ, "PYTHONPATH": path}
        ) as process,
    ):
        os.close(there)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(question, enc_hook=str))  # paths
        process.stdin.close()
        text = answers.read()
    if not text:
        if process.returncode < 0:
            raise FewbytesError(f"the process that prepares the run was killed (signal {-process.returncode})")
        raise SystemExit(process.returncode)
    answer = msgspec.json.decode(text, type=Answer)
    if answer.plan is None:
        raise (UserError if answer.mine else FewbytesError)(answer.error)
    return answer.plan


def _plan(question: Question) -> Planned:
    """The answer to a question. Raises UserError."""
    from fewbytes.experiments.prepared import PreparedRun, check_alone
    from fewbytes.experiments.run_folders import again_from, not_begun, resumed
    from fewbytes.experiments.settings import make_experiment
    from fewbytes.methods import short_name

    settings, where, resume = question.settings, question.where, question.resume
    unbegun = None if resume is None or question.from_round is not None else not_begun(resume)
    if resume is not None:
        settings = resumed(resume, settings, question.from_round) if unbegun is None else again_from(unbegun, settings)
        where = remembered(resume, where)
    elif where["federation"] is not None:
        if where["address"] or where["listen"]:
            raise UserError("--federation has its own address: leave out --address and --listen")
        members = read_federation(Path(where["federation"]))
        if not members.members:
            raise UserError(
                f"{where['federation']} has no members yet: `fewbytes federation invite NAME` is the first step"
            )
        some, newcomers = where["hosts"], int(settings.get("newcomers") or 0)
        names = places_for(members, newcomers, None if some is None else host_names(some))
        settings.setdefault("clients", len(names) - newcomers)
        where["hosts"] = ",".join(names)
    if where["federation"] is not None:  # whose server may have moved
        there = read_federation(Path(where["federation"]))
        where["address"], where["listen"] = there.address, there.listen
    elif resume is None and where["hosts"] is not None:
        settings.setdefault("clients", len(host_names(where["hosts"])))
    if where["mailbox"] is not None and resume is None:
        settings.setdefault("round_timeout", BY_MAILBOX_SECONDS)
    check_alone(settings)
    if (asked := make_experiment(settings)).partition.column is None:  # else the number of clients is known later
        Nodes.of(places(asked, where["hosts"]), where)
    job = PreparedRun(settings, here=None if where["hosts"] is None else ())
    notes, nodes = job.notes, places(job.experiment, where["hosts"])
    again = resume is not None and unbegun is None
    if not again:
        job.check()  # before anything of Flower's is started
    return Planned(
        method=job.method.method_name,
        name=short_name(job.experiment.method),
        headline=job.method.promises.headline,
        resuming=job.experiment.resuming("deploy"),
        notes=notes,
        asked=asked.toml(),
        settled=settled(job.experiment, where["hosts"] is not None),
        nodes=nodes,
        where=where,
        again=again,
    )


def main() -> None:
    """Answer the question on standard input. Exits with the code of the command line for unexpected errors."""

    def answer() -> None:
        question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question, dec_hook=lambda kind, text: kind(text))
        dated = nullcontext() if sys.stderr.isatty() else redirect_stderr(cast(TextIO, DatedLines(sys.stderr)))
        try:
            with dated, standard_output_for(question.as_json), naming(question.allow, question.resume):
                found = Answer(_plan(question))
        except (UserError, FewbytesError) as error:
            if getattr(error, "__notes__", None) or os.environ.get("FEWBYTES_DEBUG"):
                raise
            found = Answer(error=str(error), mine=isinstance(error, UserError))
        with open(int(sys.argv[1]), "wb") as file:
            file.write(msgspec.json.encode(found))

    ending(answer)


if __name__ == "__main__":
    main()
