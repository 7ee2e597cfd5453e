"""What JPEG costs on CIFAR-10: centralised training of FedPURIN's ResNet-8 on images as stored, and pressed once more.

    python benchmarks/paper/cifar10_jpeg.py [--samples 10000] [--epochs 15] [--seeds 1 2]

For copies of CIFAR-10 whose images are JPEG files. Without the originals their own loss cannot be measured; that of
another pass at the same quality can: each image is shifted by half a block of 8 pixels, pressed, and shifted back, so
that the second pass rounds other coefficients than the first did. Training and test images are treated alike. Prints
the best test accuracy over the epochs, %. What the second pass costs tells of what order the first one's cost is.
"""

from __future__ import annotations

import argparse
import io
from dataclasses import replace
from statistics import fmean

import numpy as np
import torch
from PIL import Image

import fewbytes as fb
from fewbytes.data import Partition, federate, load_dataset
from fewbytes.data.split import Split
from fewbytes.models.build import ModelBuilder

SHIFT, QUALITY = 4, 75  # pixels; Pillow's quality, with halved colour planes, of the copies


def pressed(split: Split) -> Split:
    """The images after another pass through JPEG, on a grid of blocks that lies elsewhere."""
    images = np.roll(np.asarray(split.x), (SHIFT, SHIFT), (2, 3)).transpose(0, 2, 3, 1)
    decoded = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=QUALITY)
        decoded.append(np.asarray(Image.open(buffer)))
    back = np.roll(np.stack(decoded).transpose(0, 3, 1, 2), (-SHIFT, -SHIFT), (2, 3))
    return Split(torch.from_numpy(np.ascontiguousarray(back)), split.y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000, help="training images")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    stored = load_dataset("cifar10")
    again = replace(stored, train=pressed(stored.train), test=pressed(stored.test))
    noise = np.asarray(stored.test.x, np.float64) - np.asarray(again.test.x, np.float64)
    print(f"the second pass changes a value by {np.sqrt((noise**2).mean()):.2f} of 255 (root mean square)")
    for name, dataset in (("as stored", stored), ("pressed once more", again)):
        found = []
        for seed in args.seeds:
            data = federate(dataset, Partition("iid", 1, samples=(args.samples, 100)), seed=seed)
            task = fb.Task.on(data, ModelBuilder("resnet8", dataset.train.shape, len(dataset.classes)), seed=seed)
            method = fb.FedAvg(fraction=1.0, epochs=1, lr=0.1, batch=100, momentum=0.9)
            result = fb.run(method, task, rounds=args.epochs, save_models=False)
            found.append(100 * result.summary["score"]["all"]["global"]["best"])
        print(f"{name:18} {fmean(found):.2f} ({', '.join(f'{value:.2f}' for value in found)})", flush=True)


if __name__ == "__main__":
    main()
