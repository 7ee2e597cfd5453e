"""The server: Flower's FedAvg averages the clients' adapters. One line is fewbytes'."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from fewbytes.flower.few_grid import compressed
from language_model.models import load

app = compressed(ServerApp(), bits=1)  # was ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    model, _ = load(config)
    start = ArrayRecord(get_peft_model_state_dict(model))
    result = FedAvg().start(grid, start, num_rounds=int(config["num-server-rounds"]))
    if config["out"]:
        set_peft_model_state_dict(model, result.arrays.to_torch_state_dict())
        model.save_pretrained(str(config["out"]))
