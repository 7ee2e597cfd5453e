"""A client's training, by NVFlare's Client API, as its hello-pt does it; the data are a file that compare.py wrote."""

from __future__ import annotations

import argparse

import numpy as np
import nvflare.client as flare
import torch
from network import Network


def main() -> None:
    """Train on this site's images until the job ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    given = parser.parse_args()
    torch.set_num_threads(1)
    flare.init()
    site = int(flare.get_site_name().rpartition("-")[2]) - 1
    with np.load(given.data) as file:
        images, labels = (torch.from_numpy(file[name][site]) for name in ("images", "labels"))
    net, order = Network(), torch.Generator().manual_seed(site)
    optimiser = torch.optim.SGD(net.parameters(), lr=given.lr, momentum=0.9)
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        net.load_state_dict(received.params)
        batches = torch.randperm(len(images), generator=order).split(given.batch)
        for batch in batches:
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimiser.step()
        state = {name: value.detach().clone() for name, value in net.state_dict().items()}
        flare.send(flare.FLModel(params=state, meta={"NUM_STEPS_CURRENT_ROUND": len(batches)}))


if __name__ == "__main__":
    main()
