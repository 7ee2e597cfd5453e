"""The Flower app that sockets_peer.py deploys: Flower's FedAvg, a client that adds noise instead of training.

The whole state_dict travels as an ArrayRecord each way. After its start and after each round the server app writes a
line to the file `marks`.
"""

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()


@client.train()
def fit(message: Message, context: Context) -> Message:
    """The weights plus noise: an update never has the objects of the message, which Flower would not send again."""
    state = message.content["arrays"].to_torch_state_dict()
    moved = {k: v + (1e-3 * torch.randn_like(v) if v.is_floating_point() else 1) for k, v in state.items()}
    metrics = MetricRecord({"num-examples": 500})
    return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)


class MarkedFedAvg(FedAvg):
    """Flower's FedAvg that marks the end of each round."""

    def __init__(self, nodes: int, marks: Path) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
        self.marks = marks

    def mark(self, what: str) -> None:
        with open(self.marks, "a") as file:
            file.write(f"{what} {time.time()}\n")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        received = list(replies)
        failed = sum(reply.has_error() for reply in received)
        self.mark("failed" if failed or len(received) < self.min_train_nodes else "round")
        return super().aggregate_train(server_round, received)


@server.main()
def main(grid: Grid, context: Context) -> None:
    from fewbytes.models import build_model

    config = context.run_config
    torch.manual_seed(0)
    model = build_model(str(config["model"]), (3, 32, 32), 10)
    strategy = MarkedFedAvg(int(config["nodes"]), Path(str(config["marks"])))
    while len(list(grid.get_node_ids())) < strategy.min_train_nodes:
        time.sleep(0.1)
    strategy.mark("start")
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=int(config["rounds"]))
