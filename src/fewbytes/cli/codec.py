"""Commands for rounds that travel as files, by mail or an object store: encode a safetensors file, decode it again."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from fewbytes.base.errors import FrameError, UserError, error_text
from fewbytes.base.files import replacing
from fewbytes.base.rate import FEWEST, MOST
from fewbytes.base.units import parse_bytes
from fewbytes.experiments.display import printed

if TYPE_CHECKING:
    from torch import Tensor

    from fewbytes.wire import Parsed

ENCODED = ".frame"
"""How the names of encoded files end, like those that `fewbytes run --keep-frames` writes."""
METADATA = "__metadata__"
BASE = "What the receiver has, too: a .safetensors or an encoded file. Only the difference from it is sent."


def encode(
    file: Annotated[Path, typer.Argument(help="A .safetensors file: a model, or an update.", metavar="FILE")],
    base: Annotated[Path | None, typer.Option(help=BASE, metavar="FILE")] = None,
    bits: Annotated[
        float | None,
        typer.Option(help="Round values to about this number of bits (default: lossless).", min=FEWEST, max=MOST),
    ] = None,
    exact: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated tensors that --bits does not round (default: statistics of normalisation layers).",
            metavar="NAMES",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"Output file (default: FILE with {ENCODED}).", metavar="FILE")
    ] = None,
) -> None:
    """Encode a safetensors file in few bytes, to be sent by mail or an object store.

    Example: `fewbytes encode round-8.safetensors --base round-7.safetensors --bits 2`
    """
    from fewbytes.codec import Encoder
    from fewbytes.codec.coder import LIMIT

    if exact is not None and bits is None:
        raise UserError("--exact has no effect without --bits: add --bits, or leave --exact out")
    if _is_encoded(file):
        raise UserError(f"{file} is encoded already: fewbytes decode {quote(str(file))}")
    out = _unused(out or file.with_suffix(ENCODED))
    state = _safetensors(file)
    known = None if base is None else _state(base, max(LIMIT, 2 * _nbytes(state)))
    names = None if exact is None else [name.strip() for name in exact.split(",") if name.strip()]
    encoder = Encoder(bits, exact=names)
    try:
        data = encoder.encode(state, known)
    except TypeError as error:
        raise UserError(f"{file} cannot be encoded: {error}") from None
    _write(out, data)
    lost = f"; rounding error {encoder.nmse:.2g}" if bits is not None else ""
    before = file.stat().st_size
    fewer = f" ({before / len(data):.3g} times fewer bytes than the file)" if len(data) < before else ""
    printed.print(f"wrote {out}: {before:,} bytes became {len(data):,}{fewer}{lost}", soft_wrap=True)


def decode(
    file: Annotated[Path, typer.Argument(help="An encoded file.", metavar="FILE")],
    base: Annotated[
        Path | None, typer.Option(help="The file that the sender gave as --base, or its decoded form.", metavar="FILE")
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(help="Maximum size of the decoded tensors (default: 1GiB, or twice the base).", metavar="SIZE"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output file (default: FILE with .safetensors).", metavar="FILE")
    ] = None,
) -> None:
    """Decode a file that `fewbytes encode` or `fewbytes.codec` made, to a safetensors file.

    Example: `fewbytes decode round-8.frame --base round-7.safetensors`
    """
    from safetensors.torch import save

    from fewbytes.codec.coder import LIMIT

    most = LIMIT if limit is None else _size(limit)
    if not _is_encoded(file):
        raise UserError(f"{file} is not an encoded file: those begin with the letters FEWB")
    out = _unused(out or file.with_suffix(".safetensors"))
    known = None if base is None else _state(base, most)
    if limit is None and known is not None:
        most = max(most, 2 * _nbytes(known))
    state = _decoded(file, known, base, most)
    if METADATA in state:
        raise UserError(f"{file} has a tensor {METADATA!r}, a name that safetensors files keep for themselves")
    data = save(state, {"format": "pt"})
    _write(out, data)
    printed.print(f"wrote {out}: {file.stat().st_size:,} bytes became {len(data):,}", soft_wrap=True)


def _state(path: Path, limit: int) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of an encoded file that needs no base. Raises UserError."""
    return _decoded(path, None, None, limit) if _is_encoded(path) else _safetensors(path)


def _is_encoded(path: Path) -> bool:
    """Whether a file begins as encoded ones do. Raises UserError for one that cannot be read."""
    from fewbytes.wire.frame import MAGIC

    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, KeyError, AttributeError) as error:  # the latter: types that this torch does not have
        raise UserError(f"{path} is not a safetensors file that can be read ({error_text(error)})") from None


def _decoded(path: Path, base: dict[str, Tensor] | None, named: Path | None, limit: int) -> dict[str, Tensor]:
    """The tensors in an encoded file; `named`: the file of its base. Raises UserError."""
    from fewbytes.codec.coder import decoded
    from fewbytes.codec.states import KINDS
    from fewbytes.wire import Dense, Parsed

    data = path.read_bytes()
    try:
        parsed = Parsed(data)
    except FrameError as error:
        raise UserError(f"{path} is damaged, have it sent again: {error}") from None
    if parsed.kind not in KINDS:
        raise UserError(f"{path} {_other(parsed)}")
    try:
        known = None if base is None else KINDS[parsed.kind](Dense(base))
        return decoded(data, known, limit).values.dense()
    except FrameError as error:
        if error.code not in ("base", "layout"):
            advice = "; for a sender you trust, raise --limit" if error.code == "length" else ""
            raise UserError(f"{path} cannot be decoded: {error}{advice}") from None
        if base is not None:
            raise UserError(
                f"{path} was encoded against another base than {named}: give the one its sender used"
            ) from None
        raise UserError(
            f"{path} is a difference from another state: decode it with --base, and use the decoded file"
        ) from None


def _other(parsed: Parsed) -> str:
    """Why a message is not an encoded state, and what to do with it."""
    from fewbytes.codec.stream import Versions

    if parsed.kind == Versions.__name__:
        return "is a message of a stream: decode it in Python, with fewbytes.codec.Decoder"
    return f"has a {parsed.kind[:80]!r} and no state: fewbytes inspect shows it"


def _unused(out: Path) -> Path:
    """A path to write. Raises UserError if something is there, or no folder for it."""
    if os.path.lexists(out):
        raise UserError(f"{out} exists and is not overwritten: remove it, or name another file with --out")
    if not out.parent.is_dir():
        raise UserError(f"there is no folder {out.parent} to write {out.name} in")
    return out


def _write(out: Path, data: bytes) -> None:
    with replacing(out) as file:
        file.write(data)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except UserError:
        raise UserError(f"--limit takes a size like 4GB or 800MiB, not {text!r}") from None


def _nbytes(state: dict[str, Tensor]) -> int:
    return sum(value.nbytes for value in state.values())
