"""Looks for frames that end in anything but FrameError, or in a wrong value, guided by what the decoder's code does.

    pip install atheris
    python benchmarks/hardening/fuzz.py [--seconds 60]

Needs atheris, which has no part in anything else here. A frame that was found is written as `crash-…`, for libFuzzer's
usual options, which may follow.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "wire"))

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    options, others = parser.parse_known_args()
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed (pip install atheris): nothing was fuzzed")
    with atheris.instrument_imports(include=["fewbytes.wire"]):
        from tampering import accepted, tampered
        from test_wire import cases
    names = list(cases())

    def one(data: bytes) -> None:
        """The first byte names the case, the others say how it lies."""
        if data:
            accepted(*tampered(names[data[0] % len(names)], data[1:]))

    atheris.Setup([sys.argv[0], f"-max_total_time={options.seconds}", *others], one)
    atheris.Fuzz()
