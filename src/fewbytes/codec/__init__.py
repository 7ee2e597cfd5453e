"""The codec alone: named tensors to few bytes and back, for any transport. It needs no engine and no method.

`encode` and `decode` work on one message. An `Encoder` also keeps what rounding lost and sends it later (error
feedback). A `Stream` sends versions of a model to many receivers, each of which has a `Decoder`, as differences from
what that receiver holds. All bytes are frames, in the format that `fewbytes.wire` describes, and every later version
reads them. States are dicts of torch tensors, dicts of NumPy arrays, or lists of NumPy arrays; decoding returns the
same kind.
"""

from fewbytes.base.errors import FrameError as DecodeError
from fewbytes.codec.coder import Encoder, decode, encode
from fewbytes.codec.stream import Decoder, Stream

__all__ = ["DecodeError", "Decoder", "Encoder", "Stream", "decode", "encode"]
