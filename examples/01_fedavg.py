"""FedAvg on handwritten digits, from Python: ten clients, each with its own mixture of classes."""

import fewbytes as fb
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.models import build_model

digits = load_dataset("digits")
data = federate(digits, Partition("dirichlet", clients=10, alpha=0.3), seed=0)
task = fb.Task.on(data, lambda: build_model("mlp", digits.train.shape, len(digits.classes)), seed=0)

result = fb.run(fb.FedAvg(epochs=2, lr=0.1, batch=20, momentum=0.9), task, rounds=10)

for row in result.rounds:
    up, down = row["uplink_bytes"] / 1e6, row["downlink_bytes"] / 1e6
    print(
        f"round {row['round']:2}: global {row['scores']['accuracy']['global']:.1%}, {up:.2f} MB up, {down:.2f} MB down"
    )
up, down = (result.summary[f"{way}link_bytes"] / 1e6 for way in ("up", "down"))
print(f"final {result.accuracy:.1%} after {up + down:.2f} MB ({up:.2f} up, {down:.2f} down)")
