"""Sealed files: only the receiver reads them, nobody changes them, and a partial copy is known as such."""

from __future__ import annotations

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from fewbytes.mailbox.sealed import Header, NotAccepted, Unfinished, open_sealed, read_header, seal

SENDER, RECEIVER, OTHER = (ec.generate_private_key(ec.SECP384R1()) for _ in range(3))
HEADER = Header("order", "trial", "0" * 32, 3, "server", "north", "1" * 32)
CONTENT = b"the model's bytes" * 10


@pytest.fixture
def data():
    return seal(HEADER, CONTENT, SENDER, RECEIVER.public_key())


def test_the_receiver_reads_what_the_sender_wrote(data):
    assert open_sealed(data, SENDER.public_key(), RECEIVER) == CONTENT
    header = read_header(data)
    assert (header.run, header.number, header.receiver) == ("trial", 3, "north")
    assert CONTENT[:17] not in data


def test_equal_content_is_sealed_differently_each_time(data):
    assert seal(HEADER, CONTENT, SENDER, RECEIVER.public_key()) != data


def test_every_changed_byte_is_noticed(data):
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(NotAccepted):
            open_sealed(bytes(changed), SENDER.public_key(), RECEIVER)


def test_every_partial_copy_is_unfinished(data):
    for length in range(1, len(data)):
        with pytest.raises(Unfinished, match="not complete yet"):
            read_header(data[:length])


def test_another_receiver_and_another_sender_are_refused(data):
    with pytest.raises(NotAccepted, match="encrypted to another key than that of north"):
        open_sealed(data, SENDER.public_key(), OTHER)
    with pytest.raises(NotAccepted, match="not signed with the key of server"):
        open_sealed(data, OTHER.public_key(), RECEIVER)


def test_a_ciphertext_cannot_be_given_another_header_and_signed_again(data):
    """The header is authenticated with the content: who cannot read it cannot pass it on as its own."""
    stolen = seal(msgspec.structs.replace(HEADER, sender="west"), CONTENT, OTHER, RECEIVER.public_key())
    header, ephemeral = read_header(data), read_header(data).ephemeral
    forged = msgspec.json.encode(msgspec.structs.replace(header, sender="west", ephemeral=ephemeral))
    head = len(forged).to_bytes(4, "little") + forged
    magic, ciphertext = stolen[:19], data[-header.length :]
    from fewbytes.mailbox import sealed

    signature = OTHER.sign(sealed._digest(head, ciphertext), sealed._SIGNED)
    forged_file = magic + head + len(signature).to_bytes(2, "little") + signature + ciphertext
    with pytest.raises(NotAccepted, match="encrypted to another key"):
        open_sealed(forged_file, OTHER.public_key(), RECEIVER)


@pytest.mark.parametrize("run", ["../elsewhere", "a/b", "", ".hidden", "a\n"])
def test_a_name_that_leads_elsewhere_is_refused(run):
    data = seal(msgspec.structs.replace(HEADER, run=run), CONTENT, SENDER, RECEIVER.public_key())
    with pytest.raises(NotAccepted, match="header is damaged"):
        read_header(data)


def test_another_file_is_none_of_ours():
    with pytest.raises(NotAccepted, match="not a sealed file"):
        read_header(b"PK\x03\x04")
