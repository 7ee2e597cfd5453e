"""Payloads to bytes and back, lossless unless a run rounds values; nothing is ever unpickled.

The format, version 3. Sections are little-endian; nothing in a frame names code to run::

    magic               'FEW', 3 bytes
    version, a byte     3, plus 128 if there is a layout hash, plus 64 if there is a base hash
    layout hash         4 bytes, or none
    base hash           8 bytes, or none
    header's length     in as few groups of seven bits as it needs, the lowest first; the top bit of a byte says that
                        more follow
    header              msgpack array [kind, fields, lengths], at most 1 MiB in what travels; without sections also
                        [kind, fields]
    sections            one after another; before one of 1,024 bytes or more, zeros to a multiple of 8 bytes
    digest, 16 bytes    BLAKE3 of everything before: names the frame

`kind` is the payload's class name, `fields` its fields in the class's order, `lengths` the sections' in bytes. None,
booleans, integers, floats and strings are stored in the header; lists and tuples as arrays, dicts as arrays of pairs,
an optional value as null or an array of one, a dataclass as the array of its fields. Bytes are a section and their
length. Named tensors are [entries, groups]. `entries` is true for all entries of the layout, a bitset over it (lowest
bit first), or, if the layout lacks one of them, an array of [name, type, shape]. The layout is the model's names, types
and shapes. Both ends build it from their own model; only its hash travels (the first bytes of SHA-256 of the msgpack
array of all [name, type, shape]), and a frame of another layout is refused. Each tensor type has one group, in order of
first appearance: a coding of all its numbers, entry after entry, in C order.

A coding of numbers is one of four. [0]: one section (none for no numbers) with the raw numbers. [1, flags]: byte planes
from the lowest to the highest, of floats after rotating the sign bit to the lowest place (32-bit numbers have three
planes: the two lowest bytes together). [4, mask, flags]: a mask of the numbers that differ from the base, and byte
planes of these numbers' bits minus the base's, modulo their range, plus 0x80 in each byte but the highest (32-bit
numbers have four planes, or three: the two lowest bytes together). Each plane is a section, raw (flag 0) or compressed
by zstandard (flag 1); or no section, if all its bytes are the flag minus 2. [5]: all numbers equal the base's. The base
is the message that a reply answers: its first tensor of the same name, or zeros if there is none of the same type and
shape; the base hash is the first 8 bytes of that message's digest. A coding of a mask is [kind, flag, length, ones] and
one section of `length` bytes once decompressed: packed bits, lowest first (kind 0), or, if not longer, the run lengths
before ones (1) or zeros (2), a byte each; 255 means 255 and more to come. A masked value is [entries, mask, numbers].
Bits are [entries, mask]. A quantised value is [entries, bits, grid, levels]. Its grid has two float32 numbers for each
entry: the value of level 0 and the step to the next. Its levels are unsigned numbers of 8 or 16 `bits`. The entries of
both describe the float32 values they represent.

Places are chosen positions below a size. They travel as a mask of that size, or as [shift, length, count] and one
section of `length` bytes, lowest bits first. It has the `shift` lowest bits of the run length before each place (the
lowest bit of all run lengths, then the next of all), then the rest of each in unary: that number of zeros, and a one.
If more than half of the positions are chosen, the run lengths are those before the others. Chosen values are [entries,
depth, places, numbers]: places in the first `depth` dimensions of all entries, one after another, and all numbers
there. Signs are [entries, mask of non-zeros, mask of the positive among them, numbers] with one float32 number, the
scale; their entries describe the float32 values they represent. Packages are [single, whole, magnitudes, count,
patterns, which]: three chosen values, the magnitudes as entries of two dimensions, one for each kernel; and two codings
of numbers, `count` patterns (int64) and, for each magnitude, its pattern's number (uint8).

Messages have a base, too. That of a rounded message is the previous message as its receiver has it, or an earlier one,
packed again without coding, whose digest counts. A reply to a rounded message names it by that digest, too. That of
others, and of a first message, is the first weights of the receiver's model. Their digest is BLAKE3 over each entry:
name, type and shape as text, and the numbers; or, for the first of rounded messages, BLAKE3 of that digest, with the
weights as multiples of 2^(e - 20), where 2^e is the lowest power of two above all of them.

In runs that round, the numbers of named tensors and of a masked value may be [6, ways, step, points, levels, numbers].
`ways` has two bits for each tensor, the lowest first: 0 for unrounded, coded in `numbers`; 1 for rounded; 2 for its
rounded difference to the base; 3 for its rounded difference to the tensor of that name in the base's wire value of the
same position, counted in the order of fields. `step` is the integer of a float32 number's bits. A level n represents
the float32 number step (n + p / 254) with a sign; p (-127 to 127) is the first of three `points` for n = 1, the second
for n = 2, the third from n = 3 on. Level 0 represents 0. `levels` is [low, high, most, scales, tables], for all levels,
tensor after tensor in C order; for a masked value, those of kept values. `scales` is a coding of signed bytes. Each
tensor is seen as (output channels, input channels, the rest), or as (1, 1, all) below two dimensions, and has one
number; then one for each place of each of the three axes with more than one place and 32 values or more a place. A
level's class is the sum of the numbers of its tensor and its places, clipped to `low` and `high`. `tables` is a coding
of bytes: one for each of `most` symbols, for each class from `low` to `high`. 0 is a symbol that does not occur, n the
frequency 2^(12 + (n - 255) / 21), rounded. If `tables` is null, a class k has usual frequencies: of values with a
Laplace distribution, of which a magnitude reaches level 1 at 0.65 steps and a further level n at n - 0.4. It has the
scale at which the mean level is 2^(k/2) - 2^-7, rounded to 64ths of an octave (`levels.py` has these: -245 below class
-13, and 32 more a class above 8), and frequencies are 4096 for the most frequent symbol, at least 1. A level n below 16
is its own symbol; for others, with s the bit length of n less 4, the symbol is 8 s + (n >> s), and s low bits are left.
Three sections follow. First the symbols, 32-bit words of asymmetric numeral systems as in constriction's `AnsCoder`
(`Categorical` models of the tables, not perfect), in blocks of 2^18 levels, by class within a block, the lowest first.
Then a sign bit for each level that is not 0 (1: negative). Then the low bits that are left, the lowest of all levels
that have one, then the next of all.

Images are [shape, numbers]: 8-bit pixels (n, channels, height, width), in C order; or, if smaller, [shape, null] and
sheets, each of as many pictures one below the other as fit 16383 rows and 2^20 pixels. A picture is an image of three
channels (red, green, blue), else one channel of an image, as grey. Each sheet is a section: a lossless WebP file of one
opaque image without its first 25 bytes, which follow from the sheet's size and the section's length.

A receiver checks, in this order: magic, version, the digest, that the header fits, its number of items and their types,
that the sections add up exactly, and zero padding. Only then does it decode, into sizes from its own layout or bounded
by its limit, which also counts dense forms of values. Any error raises `FrameError`.

Versions 1 and 2 can still be read. They had a prelude of 64 bytes: magic 'FEWB' | major u8 | minor u8 | flags u16 (0) |
header length u32 | CRC32C of the header u32 | body length u64 | layout hash, 16 bytes | base hash, 16 bytes (zeros for
none) | reserved u32 (0) | CRC32C of the 60 bytes before. After the header, and after each section, were zeros to a
multiple of 8 bytes. The header had pairs (length, CRC32C) for sections; the digest had 32 bytes. Rounded values were
[3, ways, step, points, levels, numbers], with a byte for each way, a float step, and tables of unsigned 16-bit
frequencies. Version 1 had [2, flags] instead of [4, mask, flags]: byte planes of all numbers' differences to the base,
zig-zag, where floats were compared as integers in the same order.
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
