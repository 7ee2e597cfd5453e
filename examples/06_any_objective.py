"""What can be learnt besides classes, from Python: numbers, several labels a sample, a class for every pixel."""

import torch
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn

import fewbytes as fb
from fewbytes.models.unet import UNet


def split(x: Tensor, y: Tensor, clients: int = 4):
    """(train, test) of each client, and the server's test set."""
    parts = [(x[i :: clients + 1], y[i :: clients + 1]) for i in range(clients + 1)]
    return [((a[10:], b[10:]), (a[:10], b[:10])) for a, b in parts[:-1]], parts[-1]


def perceptron(inputs: int, outputs: int):
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


def moved(result: fb.Result) -> str:
    up, down = (result.summary[f"{way}link_bytes"] / 1e6 for way in ("up", "down"))
    return f"{up + down:.2f} MB up and down"


method = fb.FedAvg(epochs=3, lr=0.05, batch=16, momentum=0.9)

# Numbers: floats are learnt by the mean squared error, and scored by the mean absolute one unless metrics are named.
x, y = load_diabetes(return_X_y=True)
x, y = torch.tensor(x * 20).float(), torch.tensor((y - y.mean()) / y.std()).float()
task = fb.Task.of(perceptron(10, 1), *split(x, y), metrics=["mae", "r2"])
result = fb.run(method, task, rounds=6)
r2 = result.summary["further"]["r2"]["global"]["final"]
print(f"numbers: mae {result.score:.2f}, r2 {r2:.2f}, {moved(result)}")

# Any of several labels: bools (n, labels) are learnt by the binary cross-entropy of each.
digits = load_digits()
x, y = torch.tensor(digits.images[:, None] / 16).float(), torch.tensor(digits.target)
labels = torch.stack([y % 2 == 0, y > 4, y == 8], 1)
result = fb.run(method, fb.Task.of(perceptron(64, 3), *split(x, labels)), rounds=6)
print(f"several labels: f1 {result.score:.2f}, {moved(result)}")

# A class for every pixel: integers (n, height, width), 255 where nothing is known.
masks = (x[:, 0] > 0.3).long() + (x[:, 0] > 0.7).long()
result = fb.run(method, fb.Task.of(lambda: UNet((1, 8, 8), 3, width=4), *split(x[:400], masks[:400])), rounds=4)
print(f"a class for every pixel: iou {result.score:.2f}, {moved(result)}")

# A loss and a metric of your own: functions, or torchmetrics' classes.
task = fb.Task.of(
    perceptron(64, 10),
    *split(x, y),
    loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1),
    metrics=["balanced-accuracy", "auc"],
)
result = fb.run(fb.FedPURIN(epochs=3, lr=0.05, batch=16), task, rounds=4)
print(f"classes: balanced accuracy {result.score:.2f} ({result.summary['score']['kind']}), {moved(result)}")
