"""Your own ServerApp and ClientApp, your own model and data: each node loads only its own client's.

To use it, name `fewbytes_example.own:server` and `fewbytes_example.own:client` in pyproject.toml.
"""

import tempfile
from pathlib import Path

import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

import fewbytes as fb
from fewbytes.flower.apps import client_app, serve

CLIENTS = 2


def load_data(client: int):  # in your project: read this node's own files
    g = torch.Generator().manual_seed(client)
    y = torch.randint(0, 2, (60,), generator=g)
    x = torch.randn(60, 8, generator=g) + 2 * y[:, None] - 1
    return (x[:40], y[:40]), (x[40:], y[40:])


# The ten lines.
method = fb.FedPURIN(tau=0.3, epochs=2, batch=20)
server = ServerApp()


@server.main()
def main(grid, context):
    task = fb.Task.of(lambda: torch.nn.Linear(8, 2), [None] * CLIENTS)  # the server has no data
    out = context.run_config.get("out") or Path(tempfile.mkdtemp()) / "run"
    result = serve(grid, method, task, rounds=context.run_config["rounds"], out=out)
    print(f"done: {result.folder} (`fewbytes report` writes an HTML report)", flush=True)


def my_task(context):
    clients = [None] * CLIENTS
    me = context.node_config["partition-id"]
    clients[me] = load_data(me)
    return fb.Task.of(lambda: torch.nn.Linear(8, 2), clients)


client = client_app(method, my_task, app=ClientApp())
