"""The server: Flower's FedAvg. LINKS_DOWN, if set, gives the bits of the changed line, and LINKS_FIRST whether it has
`first`."""

from __future__ import annotations

import os

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from task import first, keep

app = ServerApp()
if os.environ["LINKS_DOWN"]:
    from fewbytes.flower.few_grid import compressed

    given = first if os.environ["LINKS_FIRST"] else None
    app = compressed(ServerApp(), bits=float(os.environ["LINKS_DOWN"]), first=given)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds; the model of each is kept."""
    sites = int(os.environ["LINKS_SITES"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
    rounds = int(context.run_config["num-server-rounds"])
    strategy.start(grid, ArrayRecord(first()), num_rounds=rounds, timeout=86400, evaluate_fn=kept)


def kept(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Keep a round's model, to be scored when nothing is timed any more."""
    keep(arrays.to_torch_state_dict(), server_round)
    return MetricRecord({})
