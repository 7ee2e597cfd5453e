"""A client of NVFlare: trains the model that it is sent, by the Client API."""

from __future__ import annotations

import nvflare.client as flare
from task import train


def main() -> None:
    """Train until the job ends."""
    flare.init()
    site = int(flare.get_site_name().rpartition("-")[2]) - 1
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        trained = train(received.params, site, int(received.current_round) + 1)
        flare.send(flare.FLModel(params=trained, meta={"NUM_STEPS_CURRENT_ROUND": 1}))


main()
