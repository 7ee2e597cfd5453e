"""The client: trains the model that it is sent. LINKS_UP, if set, gives the bits of the changed line, and LINKS_FIRST
whether it has `first`."""

from __future__ import annotations

import os

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import first, train

app = ClientApp()
if os.environ["LINKS_UP"]:
    from fewbytes.flower.mod import fewbytes_mod

    given = first if os.environ["LINKS_FIRST"] else None
    app = ClientApp(mods=[fewbytes_mod(bits=float(os.environ["LINKS_UP"]), first=given)])


@app.train()
def fit(message: Message, context: Context) -> Message:
    """One round's training."""
    state = message.content["arrays"].to_torch_state_dict()
    round_number = int(message.content["config"]["server-round"])
    trained = train(state, int(context.node_config["partition-id"]), round_number)
    metrics = MetricRecord({"num-examples": int(os.environ["LINKS_IMAGES"])})
    return Message(RecordDict({"arrays": ArrayRecord(trained), "metrics": metrics}), reply_to=message)
