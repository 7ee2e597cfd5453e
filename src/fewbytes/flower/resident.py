"""Resident nodes: application and data are loaded once, in one process for one or several clients, and stay.

No code from the SuperLink runs: a run's application must be the one installed with this package, which is used.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from flwr.app import Error, Message
from flwr.clientapp import ClientApp

from fewbytes.base.errors import FewbytesError, UserError, one_line, visible
from fewbytes.base.files import check_writable
from fewbytes.flower.application import is_installed
from fewbytes.flower.apps import failure, node_folder
from fewbytes.flower.fleet import Fleet, Refused, RunOver, Stopped
from fewbytes.flower.gate import DECLINED, policy_of
from fewbytes.flower.node_file import NodeFile
from fewbytes.flower.private.errors import APP_RAISED, APP_REFUSED
from fewbytes.flower.private.programs import LOGGER
from fewbytes.running.node_status import NodeWatch

LEAVE_SECONDS = 2.0  # for nodes to disconnect at the end
AGAIN_SECONDS = 1.0  # before connecting again to a SuperLink that has refused a request


def serve(files: Sequence[tuple[Path, NodeWatch]], app: ClientApp) -> None:
    """Run the nodes of these files until SIGTERM or SIGINT; each watch has the node's name, and keeps its status. A
    changed address of the SuperLink is followed.

    Raises UserError for an unreadable file, key or certificate, for a folder that is not writable, and for a SuperLink
    that does not match the certificate.
    """
    nodes_of = [(NodeFile.read(path).placed(path.parent), watch) for path, watch in files]
    for (about, _), (path, _) in zip(nodes_of, files, strict=True):
        try:
            policy_of(about.config)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        check_writable(node_folder(about.config))
    logging.getLogger(LOGGER).setLevel(logging.ERROR)
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    worker = ThreadPoolExecutor(1)  # torch's number of threads, on which results depend, is set per thread
    nodes = [_Resident(about, watch, app, worker, stop) for about, watch in nodes_of]
    try:
        for node in nodes:
            node.start()
        while not stop.wait(0.5) and any(node.is_alive() for node in nodes):
            for node, (path, _) in zip(nodes, files, strict=True):
                _follow(node.fleet, path)
    finally:
        stop.set()
        leaving = [threading.Thread(target=node.fleet.leave, daemon=True) for node in nodes]
        for thread in leaving:
            thread.start()
        deadline = time.monotonic() + LEAVE_SECONDS
        for thread in leaving:
            thread.join(max(0.0, deadline - time.monotonic()))
        for number, handler in before.items():
            signal.signal(number, handler)
    for node in nodes:
        if node.failed is not None:
            raise node.failed
    if any(node.is_alive() for node in nodes):  # busy training or with a request, which cannot be interrupted
        sys.stdout.flush()
        os._exit(0)


def _follow(fleet: Fleet, path: Path) -> None:
    """Follow a new address of the SuperLink in a node's file; a file that is being edited is read again."""
    with suppress(UserError):
        if (superlink := NodeFile.read(path).superlink) != fleet.superlink:
            fleet.move(superlink)


class _Resident(threading.Thread):
    """One node; `failed`: the error that ended it."""

    def __init__(
        self, about: NodeFile, watch: NodeWatch, app: ClientApp, worker: ThreadPoolExecutor, stop: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self.about, self._watch, self._app, self._worker = about, watch, app, worker
        self.fleet = Fleet(about.superlink, Path(about.ca), Path(about.key), self._say, watch, stop)
        self.failed: FewbytesError | None = None
        self._refused = ""  # why the server's last question was not answered

    def run(self) -> None:
        """Answer messages until the node is stopped."""
        try:
            while True:
                self.fleet.connect()
                with suppress(Refused):  # by a restarted SuperLink: connecting reports the reason
                    while True:
                        self._serve(self.fleet.receive())
                self.fleet.wait(AGAIN_SECONDS)
        except Stopped:
            pass
        except FewbytesError as error:
            self.failed = error
        except Exception as error:
            traceback.print_exc()
            self.failed = FewbytesError(one_line(error))
        if self.failed is not None:
            self._say(f"ERROR: {self.failed}")

    def _serve(self, message: Message) -> None:
        started = time.monotonic()
        asked = message.metadata
        try:
            reply = self._worker.submit(self._reply, message).result()
            seconds = time.monotonic() - started
            self.fleet.answer(message, reply, seconds)
        except RunOver:
            self.fleet.confirm(message)
            return
        sent, what = time.monotonic() - started - seconds, f"round {asked.group_id or 0}: {asked.message_type}"
        why, trains = failure(reply), asked.message_type.startswith("train")
        self._watch.answered(asked.run_id, seconds if trains else 0.0, why.startswith(DECLINED), bool(why))
        if why.startswith(DECLINED):
            return  # the node has said so, as it does on Flower's own nodes
        if why:
            if why != self._refused:  # the server asks again before each round
                self._say(f"{what} failed: {why}")
            self._refused = "" if trains else why
        else:
            self._say(f"{what} took {seconds:.2f} s, its reply {sent:.2f} s")

    def _reply(self, message: Message) -> Message:
        run = message.metadata.run_id
        if not is_installed(self.fleet.application(run)):
            why = "the run's application is not the one installed here"
            self._say(f"refused: {why}")
            return Message(Error(APP_REFUSED, why), reply_to=message)
        try:
            config = {"key": self.about.key, **self.about.config}
            return self._app(message, self.fleet.context(run, config))
        except (RunOver, Refused, Stopped):
            raise
        except Exception as error:  # Flower's own node reports as much to the server
            self._say(f"ERROR: {one_line(error)}")
            return Message(Error(APP_RAISED, one_line(error, 300)), reply_to=message)

    def _say(self, what: str) -> None:
        print(f"{self._watch.name}: {visible(what)}", flush=True)
