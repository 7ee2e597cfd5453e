"""Payloads to bytes and back, without loss unless a run asks for it; nothing is ever unpickled.

The format, version 2. All integers are little-endian; nothing in a frame names code to run::

    prelude, 64 bytes   magic 'FEWB' | major u8 | minor u8 | flags u16 (0; bit 0 is kept for a signature) |
                        header length u32 (at most 1 MiB in what travels) | CRC32C of the header u32 |
                        body length u64 |
                        layout hash, 16 bytes | base hash, 16 bytes | reserved u32 (0) | CRC32C of the 60 bytes before
    header              msgpack array [kind, fields, sections], then zeros to a multiple of 8 bytes
    body                the sections one after another, each followed by zeros to a multiple of 8 bytes
    digest, 32 bytes    BLAKE3 of everything before: names the frame

`kind` is the payload's class name, `fields` its fields in order, whose types the class says, `sections` a pair (length,
CRC32C) for each.
None, booleans, integers, floats and strings stand in the header as they are, lists and tuples as arrays, dicts as
arrays of pairs, an optional value as null or an array of one, dataclasses as the array of their fields; bytes
are a section and their length. Named tensors are [entries, groups]. `entries` is true for all entries of the layout,
a bitset over it (lowest bit first), or, if the layout lacks one of them, an array of [name, type, shape]. The layout
is the model's names, types and shapes, which both ends build from their own model: only its hash travels (of the
msgpack array of all [name, type, shape], 16 bytes of SHA-256; zeros: no layout), and a frame of another layout is
refused. There is one group for each tensor type, in order of first appearance: a coding of all its numbers, entry
after entry, in C order.

A coding of numbers is [0], one section (none for no numbers), the numbers as they are; or [1, flags], byte planes from
the lowest to the highest, of floats whose sign bit was rotated to the lowest place (32-bit numbers have three planes:
the two lowest bytes together); or [4, mask, flags], a mask of the numbers that differ from the base, and byte planes of
these numbers' bits less the base's, modulo their range, to which 0x80 in each byte but the highest was added (32-bit
numbers have four planes, or three: the two lowest bytes together). Each plane is a section, stored as it is (flag 0) or
through zstandard (flag 1). The base is the message a reply answers: the first tensor of the same name in it, zeros
where there is none of the same type and shape; the first 16 bytes of that message's digest travel as the base hash. A
coding of a mask is [kind, flag, length, ones] and one section of `length` bytes once decompressed: packed bits, lowest
first (kind 0), or, if that takes no more bytes, the run lengths before ones (1) or zeros (2), a byte each, 255 meaning
255 and more to come. A masked value is [entries, mask, numbers]. Bits are [entries, mask]. A quantised value is
[entries, bits, grid, levels]: the numbers of its grid are float32, for each entry the value of level 0 and the step to
the next; those of its levels are unsigned, of 8 or 16 bits as stated. Entries of both are those of the float32 values
that are meant.

Places are chosen positions below a size. They travel as a mask of that size, or as [shift, length, count] and one
section of `length` bytes, bits from the lowest on: of the gap before each place its `shift` lowest bits (the lowest bit
of all run lengths, then the next of all), then the rest of each in unary, as so many zeros and a one. If more than half
of the positions are chosen, the run lengths are those before the others. Chosen values are [entries, depth, places,
numbers]: places in the first `depth` dimensions of all entries, one after another, and all numbers that stand there.
Signs are [entries, mask of those that are not zero, mask of the positive among them, numbers], one float32 number, the
scale; their entries are those of the float32 values that are meant. Packages are [single, whole, magnitudes, count,
patterns, which]: three times chosen values, the magnitudes as entries of two dimensions, one for each kernel; and two
codings of numbers, `count` patterns (int64) and the number of one of them (uint8) for each magnitude.

A rounded message has a base, too: the message before as its receiver holds it, packed again without coding, whose
digest counts. It is also by that digest that a reply to such a message names it.

Where a run rounds, what stands for the numbers of named tensors and of a masked value may be [3, ways, step, points,
levels, numbers]. `ways` has a byte for each tensor: 0, it is not rounded, and is one of those that `numbers` codes; 1,
it is; 2, its difference to the base is. A level n stands for the float32 number step (n + p / 254) with a sign, p (-127
to 127) being the first of three `points` for n = 1, the second for n = 2, the third from n = 3 on; level 0 stands for
0. `levels` is [low, high, most, scales, tables]: of all levels, tensor after tensor in C order, of a masked value those
kept. `scales` is a coding of numbers, signed bytes: for each tensor, taken as (output channels, input channels, the
rest), or as (1, 1, all) if it has fewer than two dimensions, one number; then, for each of the three axes with more
than one place and 32 values or more a place, one for each place. A level's class is the sum of the numbers of its
tensor and its places, if below `low` that and if above `high` that. `tables` is a coding of numbers, unsigned of 16
bits: for each class from `low` to `high` how often each of `most` symbols is there. A level below 16 is a symbol;
another, with s the length of n in bits less 4, is the symbol 8 s + (n >> s), and s bits are left. Three sections
follow: the symbols, 32-bit words of asymmetric numeral systems as constriction's `AnsCoder` has them (`Categorical`
models of the tables, not perfect), in blocks of 2^18 levels, in a block those of the lowest class first; a bit for each
level that is not 0, whether it is negative; and the bits that are left, the lowest of all levels that have one, then
the next of all.

Images are [shape, numbers]: 8-bit pixels (n, channels, height, width), in C order; or [shape, null] where that takes
fewer bytes: pictures one below the other, in sheets of as many as fit 16383 rows and 2^20 pixels. A picture is an image
of three channels (red, green, blue), else one channel of an image, as grey. Each sheet is a section: a lossless WebP
file of one opaque image but for its first 25 bytes, which follow from the sheet's size and the section's length.

A receiver checks, in this order: magic, the prelude's checksum, version, that the lengths add up exactly, the
header's checksum, the digest, the header's number of items and their types, every section's bounds, checksum and zero
padding. Only then is anything decoded, into sizes taken from the receiver's own layout or bounded by its limit, in
which also counts what a value takes once it is dense. Whatever is wrong ends in one error class, `FrameError`.

Version 1 is read as well. It had [2, flags] instead of [4, mask, flags]: byte planes of the difference to the base,
floats compared as integers in the same order, all numbers, zig-zag.
"""

from fewbytes.base.errors import FrameError
from fewbytes.wire.bits import Bits
from fewbytes.wire.dense import Dense, give
from fewbytes.wire.fields import base_of, counted, pack, pack_state, unpack, unpack_state
from fewbytes.wire.frame import Frame, Parsed
from fewbytes.wire.images import Images
from fewbytes.wire.layout import Entry, Layout
from fewbytes.wire.lossy import Lossy
from fewbytes.wire.masked import Masked
from fewbytes.wire.packages import Packages
from fewbytes.wire.quantised import Quantised
from fewbytes.wire.schema import payload
from fewbytes.wire.signs import Signs
from fewbytes.wire.topk import TopK
from fewbytes.wire.value import Counted, WireValue
from fewbytes.wire.values import Base

__all__ = [
    "Base",
    "Bits",
    "Counted",
    "Dense",
    "Entry",
    "Frame",
    "FrameError",
    "Images",
    "Layout",
    "Lossy",
    "Masked",
    "Packages",
    "Parsed",
    "Quantised",
    "Signs",
    "TopK",
    "WireValue",
    "base_of",
    "counted",
    "give",
    "pack",
    "pack_state",
    "payload",
    "unpack",
    "unpack_state",
]
