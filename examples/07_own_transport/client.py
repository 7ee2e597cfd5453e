"""A client: trains what the server sends, and answers with the difference. `python client.py 0`, and 1, and 2."""

import argparse
from urllib.error import HTTPError
from urllib.request import urlopen

from task import net, samples, train

from fewbytes.codec import DecodeError, Decoder, Encoder

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("number", type=int)
parser.add_argument("--server", default="http://127.0.0.1:8000")
parser.add_argument("--bits", type=float, help="per value, in what is sent to the server (default: lossless)")
options = parser.parse_args()
decoder, encoder = Decoder(), Encoder(options.bits, averaged=True)


def ask(what: str, data: bytes | None = None) -> bytes:
    """The server's answer to a GET, or with data to a POST."""
    with urlopen(f"{options.server}/{what}?client={options.number}&version={decoder.version}", data) as answer:
        return answer.read()


x, y = samples(options.number)
while message := ask("model"):
    try:
        received = decoder.decode(message)
    except DecodeError:  # what this client holds is not what the server thinks: the next message is whole
        decoder = Decoder()
        continue
    net.load_state_dict(received)
    train(x, y)
    try:
        ask("update", encoder.encode(net.state_dict(), received))
        encoder.commit()
    except HTTPError as error:  # the server did not take it: its rounding error is not kept
        print(f"not accepted: {error.read().decode()}")
        encoder.rollback()
