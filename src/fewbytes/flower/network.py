"""The engine over a Flower grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flwr.serverapp import Grid

from fewbytes.engines.dispatcher import Dispatcher
from fewbytes.engines.engine import Engine
from fewbytes.engines.local import one_thread
from fewbytes.engines.roster import Roster
from fewbytes.engines.terms import Origin, Terms
from fewbytes.flower.link import Exchange, Link
from fewbytes.flower.nodes import Nodes
from fewbytes.flower.private.grid import look_often
from fewbytes.flower.sites import GridSites
from fewbytes.flower.transport import GridTransport
from fewbytes.running.watcher import Watcher


@contextmanager
def grid_engine(
    grid: Grid | None, terms: Terms, origin: Origin, names: Sequence[str], exchange: Exchange, watcher: Watcher
) -> Iterator[Engine]:
    """An engine that moves payloads as messages of a grid, once the clients are there that are to take part from the
    start, or again. The run folder's name is the run's on the nodes; `names`: as in `server_app`."""
    link = (exchange.link or Link)(grid, exchange, terms.policy.round_timeout)
    nodes = Nodes(link, terms.task.problem, names, terms.policy.connect_timeout)
    transport = GridTransport(terms, link, nodes, origin.nonce)
    roster = Roster(terms.task, terms.policy, origin)
    dispatcher = Dispatcher(transport, roster, terms, origin, terms.policy.round_timeout)
    sites = GridSites(terms, link, nodes, transport, dispatcher, watcher)
    engine = Engine(terms, dispatcher, sites, origin)
    look_often()
    sites.gather(origin.new)
    with one_thread():
        yield engine
