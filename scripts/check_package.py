"""Build the package and try what is built: the wheel alone, in a new environment of each Python that is here.

    python scripts/check_package.py [--pythons 3.11,3.13]

Says how long an installation takes and how large it is, with torch and without. Ends with 1 where anything is not as
it should be; a Python that is not found is said, and passed over.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
JOB = ["compare", "fedavg", "fedpurin", "separate", "--dataset", "digits", "--clients", "10", "--alpha", "0.3"]
JOB += ["--rounds", "3", "--set", "epochs=2", "--set", "lr=0.1", "--set", "batch=20", "--set", "momentum=0.9"]
REFUSED = {  # what needs an extra, and which
    ("run", "fedavg", "--engine", "flower-simulation"): "simulation",
    ("deploy", "fedavg", "--clients", "2", "--rounds", "1"): "flower",
    ("run", "fedavg", "--rounds", "1", "--monitor", "9100"): "monitor",
    ("run", "genefl", "--rounds", "1"): "clusters",
    ("run", "fedma", "--dataset", "digits", "--model", "lenet", "--set", "layers=4"): "clusters",
    ("run", "fedavg", "--dataset", "digits", "--model", "torchvision:resnet18"): "vision",
    ("run", "fedavg", "--dataset", "digits", "--metrics", "f1", "--rounds", "1"): "metrics",
}


def run(*command: str | Path, cwd: Path | None = None, code: int = 0) -> str:
    """What a command prints. Exits where it does not end with `code`."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != code:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def found(version: str) -> str | None:
    """A Python of that version that starts: on PATH, or one that pyenv keeps."""
    kept = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    for python in (shutil.which(f"python{version}"), *map(str, kept.glob(f"{version}.*/bin/python{version}"))):
        if python and subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0:
            return python
    return None


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) / 1e6


def try_wheel(python: str, wheel: Path, folder: Path) -> None:
    """Install the wheel alone and run what it promises."""
    run(python, "-m", "venv", folder / "venv")
    here = folder / "venv" / "bin"
    empty, started = megabytes(folder / "venv"), time.perf_counter()
    run(here / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    seconds, site = time.perf_counter() - started, next((folder / "venv" / "lib").glob("python*/site-packages"))
    of_torch = sum(megabytes(site / name) for name in ("torch", "nvidia", "triton") if (site / name).is_dir())
    size = megabytes(folder / "venv") - empty
    print(
        f"Python {folder.name}: installed in {seconds:.0f} s, {size:,.0f} MB, {size - of_torch:,.0f} MB without torch"
    )
    started = time.perf_counter()
    run(here / "fewbytes", "--version")
    print(f"  fewbytes --version: {time.perf_counter() - started:.2f} s")
    assert "MB" in run(here / "fewbytes", *JOB, "--out", folder / "runs", cwd=folder)
    assert list((folder / "runs").rglob("report.html"))
    for arguments, extra in REFUSED.items():
        said = run(here / "fewbytes", *arguments, "--out", folder / "refused", cwd=folder, code=2)
        if f"pip install 'fewbytes[{extra}]'" not in said or "Traceback" in said:
            sys.exit(f"fewbytes {' '.join(arguments)} does not lead to the extra {extra}:\n{said}")
    print("  the demo's job runs; what needs an extra says which")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default="3.11,3.13")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT)
        [wheel], [source] = (list((folder / "dist").glob(f"*.{kind}")) for kind in ("whl", "tar.gz"))
        print(f"wheel {wheel.stat().st_size / 1e6:.1f} MB, source {source.stat().st_size / 1e6:.1f} MB")
        for version in options.pythons.split(","):
            if python := found(version):
                (folder / version).mkdir()
                try_wheel(python, wheel, folder / version)
            else:
                print(f"python{version} is not here: not tried")


if __name__ == "__main__":
    main()
