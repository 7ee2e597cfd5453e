"""What all systems of the comparison train: ResNet-18 on CIFAR-10 pictures, from the same weights, by equal steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models.resnet import BasicBlock, ResNet

TEST = 10_000  # images

torch.set_num_threads(1)  # each site has a process of its own


class Network(ResNet):
    """torchvision's ResNet-18 for ten classes, 11,181,642 values, with the first weights of all systems. Its
    counters of batches are vectors of float32, as NVFlare's quantisers refuse whole numbers and scalars."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(BasicBlock, [2, 2, 2, 2], num_classes=10)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d) and module.num_batches_tracked is not None:
                module.num_batches_tracked = torch.zeros(1)


def first() -> dict[str, Tensor]:
    """The first weights."""
    return Network().state_dict()


def images(part: str, start: int, number: int) -> tuple[Tensor, Tensor]:
    """Images of CIFAR-10's `train` or `test` part, (n, 3, 32, 32) from -1 to 1, and their labels."""
    (file,) = (Path(os.environ["FEWBYTES_DATA"]) / "cifar10").glob(f"{part}-*.parquet")
    rows = parquet.read_table(file).slice(start, number).to_pydict()
    pictures = rows["img" if "img" in rows else "image"]
    found = np.stack([np.asarray(Image.open(BytesIO(picture["bytes"])).convert("RGB")) for picture in pictures])
    pixels = (found.transpose(0, 3, 1, 2) / np.float32(127.5) - 1).astype(np.float32)
    return torch.from_numpy(pixels), torch.tensor(rows["label"])


def train(state: Mapping[str, Any], site: int, round_number: int) -> dict[str, Tensor]:
    """An epoch over a site's images, LINKS_IMAGES of them: SGD with momentum 0.9, learning rate 0.01, batches of 32."""
    number = int(os.environ["LINKS_IMAGES"])
    x, y = images("train", site * number, number)
    net = Network()
    net.load_state_dict(state)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 * site + round_number))
    for batch in order.split(32):
        optimiser.zero_grad()
        functional.cross_entropy(net(x[batch]), y[batch]).backward()
        optimiser.step()
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def accuracy(file: Path) -> float:
    """Of a kept model on the first test images."""
    net = Network().eval()
    net.load_state_dict(torch.load(file, weights_only=True))
    x, y = images("test", 0, TEST)
    with torch.no_grad():
        return float((net(x).argmax(1) == y).float().mean())


def keep(state: Mapping[str, Any], name: int | str) -> None:
    """Keep a model in the folder LINKS_OUT, the global one by its round; its file's time is when the round ended."""
    out = Path(os.environ["LINKS_OUT"])
    torch.save({name: torch.as_tensor(value) for name, value in state.items()}, out / f"{name}.part")
    (out / f"{name}.part").rename(out / f"{name}.pt")


def alone(site: int, rounds: int) -> None:
    """A site's training alone, as many epochs as there are rounds; keeps the first model, and that of each."""
    state = first()
    keep(state, f"{site}-0")
    for round_number in range(1, rounds + 1):
        state = train(state, site, round_number)
        keep(state, f"{site}-{round_number}")


if __name__ == "__main__":
    alone(int(sys.argv[1]), int(sys.argv[2]))
