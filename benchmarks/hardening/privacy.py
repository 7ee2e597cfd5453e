"""Whether the noise of differential privacy is what is said, and what is counted what is spent."""

from __future__ import annotations

import dp_accounting
import torch
from dp_accounting.pld import PLDAccountant
from figures import Figure
from scipy.stats import kstest

from fewbytes.core.client_privacy import ClientPrivacy, clipped
from fewbytes.core.privacy import gaussian, random_bytes
from fewbytes.core.promise import Privacy


def promised(count: int) -> list[Figure]:
    """Row 23: a million draws of noise, so many updates that are clipped, and epsilon beside dp-accounting's."""
    noise = gaussian(1_000_000, random_bytes(b"0", "noise")).numpy()
    off, p = abs(float(noise.std()) - 1), float(kstest(noise, "norm").pvalue)
    generator = torch.Generator().manual_seed(0)
    longest = 0.0
    for i in range(count):
        change = {"w": torch.randn(20, generator=generator).double() * 10.0 ** (i % 60 - 30)}
        longest = max(longest, float(clipped(change, 1.5)["w"].norm()) / 1.5)
    central = ClientPrivacy(Privacy.read("epsilon=8,delta=1e-5,clip=1.5"), 20, 0)
    accountant = PLDAccountant()  # which counts in another way
    accountant.compose(dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(central.multiplier), 20))
    apart = abs(central.epsilon(20) - accountant.get_epsilon(1e-5))
    return [
        Figure("noise, a million draws: deviation off by", f"{off:.2%}", "1 %", off < 0.01),
        Figure("Kolmogorov-Smirnov's p", f"{p:.2f}", "above 0.01", p > 0.01),
        Figure(
            f"the longest of {count:,} clipped updates",
            f"{longest - 1:.0e} over the clip" if longest > 1 else "within the clip",
            "1e-6",
            longest <= 1 + 1e-6,
        ),
        Figure("epsilon of twenty rounds, beside dp-accounting's", f"{apart:.0e} apart", "1e-6", apart < 1e-6),
        Figure(
            "epsilon spent, where 8 was promised",
            f"{central.epsilon(20):.6f}",
            "no more than 8",
            central.epsilon(20) <= 8,
        ),
    ]
