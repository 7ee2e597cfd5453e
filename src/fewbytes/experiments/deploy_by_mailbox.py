"""Deployments whose members are all reached by files: the server half runs in this process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from fewbytes.base.address import host_and_port
from fewbytes.base.errors import FewbytesError
from fewbytes.base.files import private_folder
from fewbytes.experiments.app import read_run_config, with_names
from fewbytes.experiments.deploy import write_asked
from fewbytes.experiments.mailbox import Mail
from fewbytes.experiments.pages import write_page
from fewbytes.experiments.places import Nodes, write_places
from fewbytes.experiments.settings import make_experiment
from fewbytes.experiments.tasks import find
from fewbytes.federation.members import CERTIFICATES
from fewbytes.flower.apps import serve_run
from fewbytes.flower.certificates import write_certificates
from fewbytes.running.signals import terminating
from fewbytes.running.watcher import Watcher


def write_deployment(out: Path, how: Nodes, asked: str | None) -> None:
    """Write what a deployment by files needs, also to be resumed. `asked`: the settings of a new run, as given."""
    private_folder(out / "deployment")
    if how.federation is not None:
        write_certificates(how.federation / CERTIFICATES, [host_and_port(how.address)[0]])
    if asked is not None:
        write_asked(out, asked)
    write_places(out, how)


def run_by_mailbox(
    run_config: Mapping[str, Any], out: Path, how: Nodes, watcher: Watcher, resume: bool, from_round: int | None = None
) -> None:
    """Run the server half of a deployment in this process, with members that are all reached by files, and write a
    report. `run_config`: the settings, as a run config of Flower's.

    Raises the run's error, BoxError for a mailbox that cannot be reached at the start.
    """
    assert how.mailbox is not None
    assert how.federation is not None
    mail = Mail(how.mailbox, how.federation, [place.name for place in how.places])
    found = with_names(find(make_experiment(read_run_config(run_config)), here=()), ",".join(mail.names))
    run = found.run(out, resume, watcher, from_round)
    with terminating():
        try:
            exchange = mail.exchange(found.experiment, out, watcher.note)
            serve_run(None, run, mail.names, exchange)
        except FewbytesError as error:
            if (out / "config.toml").exists():
                raise type(error)(f"{error}; resume with: fewbytes deploy --resume {quote(str(out))}") from None
            raise
    write_page(found.experiment, out, mail.names)
