"""FedPURIN's Table 3 from a run with `--keep-frames`: what was sent, what the paper counts, and the entropy bounds.

    fewbytes run fedpurin --dataset cifar10 --clients 20 --alpha 0.1 --samples 500/100 --model resnet8 --keep-frames …
    python benchmarks/paper/fedpurin_table3.py RUN [--clients 3] [--rounds 1,5,10]

The paper's rule: 4 bytes a value, 1 bit a mask entry, MB = 2^20 bytes; ours beside it in MB = 10^6. Bounds of the same
payload: values at the entropy of sign and exponent plus 23 bits, or at the entropy of the magnitude of their integer
difference to the base plus the bits below its leading one; masks at their order-0 entropy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from fewbytes.base.state import State, state_of
from fewbytes.methods import fedavg, fedpurin
from fewbytes.models import build_model
from fewbytes.wire import Base, Layout, Masked, Parsed, base_of, unpack
from fewbytes.wire.coding import ordered


def entropy(symbols: np.ndarray) -> float:
    """Bits per symbol, order 0."""
    share = np.unique(symbols, return_counts=True)[1] / symbols.size
    return float(-(share * np.log2(share)).sum())


def plain_bits(values: np.ndarray) -> float:
    """Bits per float32: entropy of sign and exponent, and the 23 bits of the mantissa."""
    return entropy(values.view(np.uint32) >> 23) + 23


def base_bits(values: np.ndarray, base: np.ndarray) -> float:
    """Bits per float32 given the base: entropy of the difference's magnitude, and the bits below its leading one."""
    delta = ordered(values.view(np.uint32), True).astype(np.int64) - ordered(base.view(np.uint32), True)
    bits = np.floor(np.log2(np.abs(2 * delta + (delta < 0)) + 1))
    return entropy(bits) + float(bits.mean())


def flat(state: State) -> np.ndarray:
    return torch.cat([v.reshape(-1) for v in state.values()]).numpy()


def read(path: Path, cls: type, layout: Layout, base: Base | None = None):
    return unpack(cls, path.read_bytes(), layout=layout, base=base) if path.exists() else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", default="1,2,5,10,15,20,25")
    options = parser.parse_args()
    result = json.loads((options.run / "result.json").read_text())
    layout = Layout.of(state_of(build_model(result["model"], tuple(result["sample_shape"]), result["classes"])))
    purin = result["method"] == "fedpurin"
    up_class, down_class = (fedpurin.Critical, fedpurin.Combined) if purin else (fedavg.Trained, fedavg.Model)
    rows = [json.loads(line) for line in (options.run / "rounds.jsonl").read_text().splitlines()]
    print("per client and round, MB = 10^6 bytes (paper's count in MiB in brackets)")
    for row in rows:
        if str(row["round"]) in options.rounds.split(",") or row["phase"] != "round":
            n = row["cohort"]
            print(f"round {row['round']:3} {row['phase']:6}", *(
                f"{way}link {row[f'{way}link_bytes'] / n / 1e6:.3f} of {row[f'{way}link_nominal_bytes'] / n / 1e6:.3f}"
                f" ({row[f'{way}link_nominal_bytes'] / n / 2**20:.2f} MiB) = "
                f"{row[f'{way}link_bytes'] / max(1, row[f'{way}link_nominal_bytes']):.3f};" for way in ("up", "down")
            ))  # fmt: skip
    print("\nframes against their bounds (sizes as parts of the paper's count)")
    for t in options.rounds.split(","):
        for client in range(options.clients):
            down_path, up_path = (options.run / "frames" / f"{t}-train-{client}-{way}.frame" for way in ("down", "up"))
            down = read(down_path, down_class, layout)
            if not up_path.exists():
                continue
            digest = b"" if down is None else Parsed(down_path.read_bytes()).digest
            based = None if down is None else base_of(digest, down)
            up = read(up_path, up_class, layout, based)
            for way, payload, path, base in (("down", down, down_path, None), ("up", up, up_path, down)):
                if payload is None:
                    continue
                theta, mask, mask_bits, floor = payload.theta, None, 0.0, 0
                values = flat(theta.dense())
                reference = None if base is None else np.concatenate(
                    [flat({k: base.theta.dense()[k]}) for k in theta.dense()])  # fmt: skip
                if isinstance(theta, Masked):
                    mask = flat(theta.mask).astype(bool)
                    mask_bits, floor = entropy(mask) * mask.size, mask.size
                    values = values[mask]
                    reference = None if reference is None else reference[mask]
                count = 4 * values.size + floor / 8
                bits = {"no base": plain_bits(values)}
                if reference is not None:
                    bits["base"] = base_bits(values, reference)
                bounds = ", ".join(f"{k} {(b * values.size + mask_bits) / 8 / count:.3f}" for k, b in bits.items())
                text = f"round {t:>2} client {client} {way:4} sent {path.stat().st_size / count:.3f}; bound {bounds}"
                if mask is not None:
                    stored = Parsed(path.read_bytes()).header.sections[0][0]
                    text += f"; mask {8 * stored / mask_bits:.3f} of its entropy, density {mask.mean():.3f}"
                print(text)
