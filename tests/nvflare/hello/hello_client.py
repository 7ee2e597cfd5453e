"""A client that trains on its share of the digits, by NVFlare's Client API."""

from __future__ import annotations

import os

import nvflare.client as flare
import torch
from hello_network import Network, digits

flare.init()
torch.set_num_threads(1)
site = int(flare.get_site_name().rpartition("-")[2])
images, labels = digits(site)
net, tasks = Network(), 0
optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    if os.environ.get("DIES_IN") == str(received.current_round) and site == 1:
        os._exit(1)
    net.load_state_dict(received.params)
    for batch in torch.arange(len(images)).split(32):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
        optimiser.step()
    flare.send(flare.FLModel(params={name: value.detach().clone() for name, value in net.state_dict().items()}))
