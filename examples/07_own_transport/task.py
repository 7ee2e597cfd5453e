"""What both ends share: the model, its training, and the digits that come with fewbytes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fewbytes.data import load_dataset

CLIENTS = 3
torch.set_num_threads(1)  # four processes on one machine
torch.manual_seed(0)
digits = load_dataset("digits")
net = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
)  # fmt: skip


def samples(client: int) -> tuple[Tensor, Tensor]:
    """The images and labels of one client: every third of the training set."""
    x, y = digits.train.load()
    return x[client::CLIENTS], y[client::CLIENTS]


def train(x: Tensor, y: Tensor) -> None:
    """One epoch."""
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for batch in torch.randperm(len(x)).split(20):
        optimiser.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimiser.step()


def accuracy() -> float:
    """The share of test images that the model recognises."""
    x, y = digits.test.load()
    with torch.no_grad():
        return float((net(x).argmax(1) == y).float().mean())
