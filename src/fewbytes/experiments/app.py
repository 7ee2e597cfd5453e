"""The Flower app of any experiment: `server` and `client`, configured by the run config.

The run config's keys are an experiment's settings (`fewbytes.experiments.settings`), with the method's as
`parameters.<name>`; also `out` (the run folder; default: in .fewbytes in the home directory), `resume`, `from_round`
and `names` (the registered names of the clients' nodes, comma-separated, in the order of the clients; after `~`, one
that no node has yet, which is not waited for). With `mailbox`, the place of a mailbox, files reach the members
`by_mailbox` (comma-separated) of the `federation` in that folder. A node's
configuration may set `client-data`, the place of its own data, and `allow`, a comma-separated list of what the server
may name besides the datasets under FEWBYTES_DATA: modules of code, folders, names to download. Without a node
configuration, as in Flower's simulation, the environment variable FEWBYTES_ALLOW is that list. Anything else that a
server names is refused: nothing is imported, read or downloaded. A node reads only the settings in `NODES`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from fewbytes.base.errors import UserError
from fewbytes.base.named import only_allowed
from fewbytes.base.processes import this_process
from fewbytes.base.units import moved
from fewbytes.core.policy import Policy
from fewbytes.core.site_policy import SitePolicy
from fewbytes.experiments.groups import GROUPS
from fewbytes.experiments.membership import Membership, named_in
from fewbytes.experiments.settings import Experiment, make_experiment
from fewbytes.experiments.surveying import terms_of_node
from fewbytes.experiments.tasks import Found, find
from fewbytes.flower.application import EVENTS
from fewbytes.flower.apps import Served, default_folder, make_client_app, make_server_app, node_folder
from fewbytes.flower.link import Exchange
from fewbytes.methods import short_name
from fewbytes.running.line import score_words
from fewbytes.running.result import Result
from fewbytes.running.settings import ROUNDING, Settings
from fewbytes.running.watcher import EVENT_NAMES, Passing

NODES = frozenset({"method", "parameters", "fraction", "rounds", "dp"}).union(
    *ROUNDING.values(), *(GROUPS[name].declared() for name in ("data", "partition", "learning", "model"))
)
"""The settings that a node reads from the server."""
MEMBERS = ("federation", "mailbox", "by_mailbox")
"""The settings of a federation's run: its folder, and how files reach some members."""
OWN = ("out", "resume", "from_round", "names", *MEMBERS)
SERVERS = frozenset({*OWN, *Settings.declared(), *Policy.declared()}) - NODES
"""The server's own settings, which a node ignores; it refuses those of simulations."""
SIMULATED = frozenset({"speeds", "links", "ray_address"})

_served: dict[str, Served] = {}  # of this process, by settings and client


def read_run_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from Flower's flat run config: dots nest, dashes become underscores, empty texts are skipped. Raises
    UserError for a key that is both a value and a table."""
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if value != "":
            place = settings
            *above, last = key.replace("-", "_").split(".")
            for name in above:
                place = place.setdefault(name, {})
                if not isinstance(place, dict):
                    raise UserError(f"the run config has {name[:40]!r} both as a value and as a table: keep one")
            place[last] = value
    return settings


def _of_a_node(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The server's settings that a node reads. Raises UserError for one that a server must not send."""
    if others := sorted(settings.keys() - (NODES | SERVERS - SIMULATED)):
        raise UserError(f"the server sends the setting {others[0][:40]!r}, which nodes refuse: leave it out")
    return {key: value for key, value in settings.items() if key in NODES}


def serve_client(run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> Served:
    """What a node with this configuration serves in a run with that one; made once in a process. Raises UserError."""
    settings = _of_a_node(read_run_config(run_config))
    local = settings.get("partition") == "local"
    me = node_config.get("partition-id") if local else None
    if local and me is None:
        raise UserError("a node with its own data needs the number of its client: set its partition-id")
    given = str(node_config.get("allow") or os.environ.get("FEWBYTES_ALLOW", ""))
    allowed = [name.strip() for name in given.split(",")]
    if local and "client-data" in node_config:
        settings["client_data"] = str(node_config["client-data"])
        allowed.append(settings["client_data"])
    config = {k: v for k, v in run_config.items() if k not in ("resume", "from_round", "out")}
    run = json.dumps(config, sort_keys=True)
    terms = terms_of_node(node_config, SitePolicy.read(node_config, others=True).secure)
    terms = dataclasses.replace(terms, folder=str(node_folder(node_config)))
    key = json.dumps([run, me, allowed, str(terms)])
    if key not in _served:
        for old in [old for old in _served if json.loads(old)[0] != run]:  # a long-lived node keeps one run at a time
            del _served[old]
        with only_allowed(*allowed, anywhere=False):
            experiment = make_experiment(settings)
            method, here = experiment.build_method(), None if me is None else (int(me),)
            found = find(experiment, here, lambda client: terms)
            task = method.adapted(found.task)
            _served[key] = Served(key, method, task, tuple(allowed), json.dumps(settings, sort_keys=True))
        if me is not None:
            mine, place = task.data.clients[int(me)], experiment.data.client_data or experiment.data.dataset
            sizes = f"{len(mine.train)} training and {len(mine.test)} test samples"
            print(f"the data of client {me} are {place}: {sizes}", flush=True)
            print("\n".join(found.notes), flush=True)
    return _served[key]


def with_names(found: Found, names: str) -> Found:
    """The task with the sites' names, unless its nodes only have numbers or the names of its data."""
    called = tuple(names.split(",")) if names else ()
    if not called or found.task.data.names or all(re.fullmatch(r"client-\d+", name) for name in called):
        return found
    data = dataclasses.replace(found.task.data, names=called)
    return dataclasses.replace(found, task=dataclasses.replace(found.task, data=data))


def _serve_run(serve: Callable[..., Result], run_config: Mapping[str, Any]) -> None:
    """Run the experiment that the run config describes."""
    from fewbytes.experiments.pages import write_page  # which takes memory that a node, which imports this, can spare

    settings = read_run_config(run_config)
    out, resume, names = (settings.pop(key, empty) for key, empty in (("out", ""), ("resume", False), ("names", "")))
    from_round = settings.pop("from_round", None)
    members = {key: str(settings.pop(key)) for key in MEMBERS if key in settings}
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = (
        Path(out) if out else default_folder() / "runs" / f"{stamp}-{short_name(str(settings.get('method', 'run')))}"
    )
    with closing(_EventLog(folder)) as events:
        pid, started = this_process()
        events.write("began", pid=pid, started=started)
        try:
            found = with_names(find(make_experiment(settings), here=()), names)
            listed = names.split(",") if names else []
            exchange = _exchange(members, listed, found.experiment, folder, events) if members else None
            serve(found.run(folder, resume, events, from_round), listed, exchange)
            page = write_page(found.experiment, folder, listed)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                events.write("interrupted")
            else:
                events.write("failed", error=str(error) or type(error).__name__, mine=isinstance(error, UserError))
            raise
        events.write("ended")
        print(f"report: {page}", flush=True)


def _exchange(
    members: Mapping[str, str], names: list[str], experiment: Experiment, out: Path, events: _EventLog
) -> Exchange:
    """How a run exchanges messages with members of a federation; files may reach some of them."""
    folder = Path(members["federation"])
    if "mailbox" not in members:
        return Exchange(vacant=Membership(folder, out / "deployment", names).vacant)
    from fewbytes.experiments.mailbox import Mail

    mail = Mail(members["mailbox"], folder, names, frozenset(named_in(members.get("by_mailbox", ""))))
    return mail.exchange(experiment, out, events.note)


client = make_client_app(lambda context: serve_client(context.run_config, context.node_config))
server = make_server_app(_serve_run)


class _EventLog(Passing):
    """Writes events as lines of JSON for `fewbytes deploy`, and a line per round to the log."""

    def __init__(self, folder: Path) -> None:
        path = folder / EVENTS
        # kept open, so that a server that lost its SuperLink cannot write into a resumed run
        self._file = open(path, "a", buffering=1) if path.parent.is_dir() else None  # noqa: SIM115

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def write(self, event: str, **what: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **what}) + "\n")

    def started(self, folder: Path, rounds: int, done: int) -> None:
        self.write("started", rounds=rounds, done=done)

    def pass_on(self, event: str, *what: Any) -> None:
        if event in EVENT_NAMES:
            self.write(event, what=what)
        if event in LOGGED:
            print(LOGGED[event](*what), flush=True)


def _row_words(row: dict[str, Any]) -> str:
    scores, mb = score_words(row["scores"]), moved(row["uplink_bytes"], row["downlink_bytes"])
    when = f"round {row['round']}" if row["phase"] == "round" else "after the last round"
    return f"{when}: {scores}  {mb}  {len(row.get('left_out', []))} left out"


LOGGED: dict[str, Callable[..., str]] = {
    "waiting": lambda there, wanted: f"waiting for clients: {there} of {wanted} are connected",
    "awaited": lambda clients: f"waiting for {', '.join(clients)}",
    "joined": lambda client: f"client {client} has joined",
    "refused": lambda client, why: f"client {client} cannot join: {why}",
    "note": lambda text: f"note: {text}",
    "scored": _row_words,
}
"""What of a run is printed, in words."""
