"""A pool of a simulation's actors that replaces Flower's: it loses no message when an actor dies."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

from fewbytes.base.errors import FewbytesError
from fewbytes.flower.private import replaced

ACTOR_SECONDS = 60.0  # that a message waits for an actor while there is none
ATTEMPTS = 3  # times a message may lose its actor


def lasting_pool(most: int) -> None:
    """Have a simulation use at most `most` actors, and lose no message when one dies.

    Another actor repeats a dead actor's job, up to ATTEMPTS times; a new actor replaces it where Ray finds room.
    Flower's own pool sends further messages to dead actors, which fail, and to actors that have no room yet. Two
    messages to one client never run at once, even on two hosts.
    """
    import ray
    from flwr.simulation.ray_transport.ray_actor import BasicActorPool
    from ray.exceptions import RayActorError

    class LastingPool(BasicActorPool):
        """Flower's pool. `pool`: its idle actors; `num_actors`: counts working and starting ones, too."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.actors_capacity = min(self.actors_capacity, most)
            self._coming: dict[Any, Any] = {}  # actors by the object that is there when they are
            self._changed = threading.Condition()
            self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by client

        def add_actors_to_pool(self, num_actors: int) -> None:
            with self._changed:
                self._await([self._new() for _ in range(num_actors)])
                self.num_actors += num_actors

        def _new(self) -> Any:
            create: Any = self.create_actor_fn
            return create()

        def _await(self, actors: list[Any]) -> None:
            self._coming |= {actor.__ray_ready__.remote(): actor for actor in actors}

        def submit(self, actor_fn: Any, job: Any) -> Any:
            return actor_fn, job  # run by the next method, which may have to repeat it

        def fetch_result_and_return_actor_to_pool(self, future: Any) -> Any:
            actor_fn, job = future
            with self._turns[job[2]]:
                for _ in range(ATTEMPTS - 1):
                    with suppress(RayActorError):
                        return self._done(actor_fn, job)
                return self._done(actor_fn, job)

        def _done(self, actor_fn: Any, job: Any) -> Any:
            """Run a job on an idle actor, which is idle again afterwards unless it has died."""
            actor = self._idle()
            try:
                _, message, context = ray.get(actor_fn(actor, *job))
            except RayActorError:
                ray.kill(actor)  # if it is only out of reach
                with self._changed:  # idle ones may have died with it
                    self._await([self._new(), *self.pool])
                    self.pool.clear()
                raise
            except BaseException:
                self._give_back(actor)
                raise
            self._give_back(actor)
            return message, context

        def _give_back(self, actor: Any) -> None:
            with self._changed:
                self.pool.append(actor)
                self._changed.notify()

        def add_actor_back_to_pool(self, future: Any) -> None:
            pass  # it is back

        def _arrive(self, word: Any, actor: Any) -> None:
            try:
                ray.get(word)
                self.pool.append(actor)
            except RayActorError:
                self._await([self._new()])

        def _idle(self) -> Any:
            """An actor that is alive and has nothing to do. Raises FewbytesError where there is none."""
            with self._changed:
                deadline = time.monotonic() + ACTOR_SECONDS
                while True:
                    if self._coming:
                        there, _ = ray.wait(list(self._coming), num_returns=len(self._coming), timeout=0)
                        for each in there:
                            self._arrive(each, self._coming.pop(each))
                    if self.pool:
                        return self.pool.pop()
                    if self.num_actors > len(self._coming):
                        deadline = time.monotonic() + ACTOR_SECONDS  # some actor works
                    elif time.monotonic() > deadline:
                        raise FewbytesError(f"no host of the Ray cluster had a free processor for {ACTOR_SECONDS:g} s")
                    self._changed.wait(0.1)

    replaced("flwr.server.superlink.fleet.vce.backend.raybackend", "BasicActorPool", LastingPool)
