"""A stream to many receivers over links that lose messages, ends that restart, and bytes that were tampered with."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbytes.base.errors import UserError
from fewbytes.codec import DecodeError, Decoder, Stream, decode
from fewbytes.codec.states import first_state
from fewbytes.wire import Parsed

FRAMES = Path(__file__).parent / "frames"

EVENTS = ["send", "lost", "unconfirmed", "restart", "gone"]


def state(seed: int, size: int = 400) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(size, generator=generator), "norm.running_mean": torch.rand(3, generator=generator)}


def moved(held: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    other = state(seed, len(held["w"]))
    return {name: value + 0.01 * other[name] for name, value in held.items()}


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@settings(max_examples=40)
@given(
    st.sampled_from([None, 0.5, 2.0]),
    st.booleans(),
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["send", "lost", "unconfirmed", "restart", "gone"])), max_size=25
    ),
)
def test_whatever_is_lost_a_receiver_ends_with_what_the_stream_says(bits, known, events):
    """Receivers get messages, lose them, get them without the sender hearing of it, restart with or without their
    state; each message that is decoded leads to the stream's version, and none that cannot be decoded goes unseen."""
    first = state(0) if known else None
    stream, model = Stream(bits, first=first), state(0)
    firsts = [first, None if known else state(1), first]  # of the second receiver: other first weights, or none
    receivers = [Decoder(first=each) for each in firsts]
    for n, (i, event) in enumerate(events):
        model = stream.advance(moved(model, n))
        if event == "gone":
            receivers[i] = Decoder(first=firsts[i])
        if event == "restart":
            saved = receivers[i].state()
            receivers[i] = Decoder(first=firsts[i])
            receivers[i].load(saved)
            saved = stream.state()
            stream = Stream(bits, first=first)
            stream.load(saved)
        if event == "lost":
            stream.message(i)
            continue
        try:
            got = receivers[i].decode(stream.message(i))
        except DecodeError:
            assert receivers[i].version == 0
            stream.forget(i)
            got = receivers[i].decode(stream.message(i))
        assert equal(got, stream.held)
        assert receivers[i].version == stream.version
        if event != "unconfirmed":
            stream.received(i, receivers[i].version)


def test_differences_are_small_and_a_model_sent_again_costs_nothing():
    stream, decoder = Stream(0.5), Decoder()
    held = stream.advance(state(0, 40_000))
    whole = stream.message("a")
    decoder.decode(whole)
    stream.received("a", 1)
    new = {name: value + torch.randn_like(value) / 100 for name, value in held.items()}
    stream.advance(new)
    assert len(stream.message("a")) < len(whole) / 20
    decoder.decode(stream.message("a"))
    stream.received("a", decoder.version)
    stream.advance(new)
    assert stream.version == 2
    assert len(stream.message("a")) < 250
    assert equal(decoder.decode(stream.message("a")), stream.held)


@pytest.mark.parametrize("bits", [None, 1])
def test_first_weights_that_both_ends_hold_are_not_sent(bits):
    first = state(0, 40_000)
    stream, near, other, none = Stream(bits, first=first), Decoder(first=first), Decoder(first=state(1)), Decoder()
    held = stream.advance(first)
    assert len(stream.message("near")) < 200
    assert equal(near.decode(stream.message("near")), held)
    for receiver in (other, none):
        with pytest.raises(DecodeError) as raised:
            receiver.decode(stream.message("new"))
        assert raised.value.code == "base"
    stream.forget("new")
    assert equal(none.decode(stream.message("new")), held)
    for n in range(4):
        held = stream.advance(moved(held, n))
        late = Decoder(first=first)
        message = stream.message(f"late {n}")
        assert equal(late.decode(message), held)
        assert len(message) < len(Stream.message(plain(held, bits), "late"))
    stream.advance(state(7, 40_000))  # nothing like the first weights: whole, and not longer for them
    assert len(stream.message("later")) <= 1.01 * len(plain(state(7, 40_000), bits).message("later"))


def plain(model, bits) -> Stream:
    stream = Stream(bits)
    stream.advance(model)
    return stream


def test_statistics_that_have_grown_do_not_make_a_message_whole():
    first = state(0, 40_000)
    stream = Stream(1, first=first)
    held = stream.advance(first)
    stream.received("near", stream.version)
    stream.advance(moved(held, 1) | {"norm.running_mean": torch.full((3,), 1e4)})
    assert len(stream.message("near")) < 20_000
    assert len(stream.message("new")) < 30_000


def test_counters_of_batches_that_were_averaged_do_not_make_a_message_whole():
    """Servers average them with everything else: whole numbers become fractions of another type."""
    stream, decoder = Stream(), Decoder()
    counted = {"norm.num_batches_tracked": torch.tensor(4)}
    held = stream.advance(state(0, 40_000) | counted)
    whole = stream.message("a")
    decoder.decode(whole)
    stream.received("a", decoder.version)
    averaged = {name: value + 1e-7 for name, value in held.items()} | {"norm.num_batches_tracked": torch.tensor(6.5)}
    held = stream.advance(averaged)
    assert held["norm.num_batches_tracked"].equal(torch.tensor(6))
    assert len(stream.message("a")) < 0.5 * len(whole)
    assert equal(decoder.decode(stream.message("a")), held)


def test_a_seed_that_makes_first_weights_leaves_the_random_numbers_of_training():
    def first():
        torch.manual_seed(0)
        return {"w": torch.randn(4)}

    torch.manual_seed(7)
    alone = torch.rand(3)
    torch.manual_seed(7)
    made = first_state(first)
    assert torch.equal(torch.rand(3), alone)
    assert torch.equal(made["w"], first()["w"])


def test_first_weights_may_change_afterwards():
    first = state(0)
    stream, decoder = Stream(first=first), Decoder(first=first)
    held = stream.advance(first)
    first["w"] += 1
    assert equal(decoder.decode(stream.message(0)), held)


def test_what_rounding_lost_is_sent_with_the_next_version():
    """A server that averages models trained from what receivers hold: no update is lost for good."""
    stream, wanted = Stream(1), state(0)
    held = stream.advance(wanted)
    for n in range(10):
        update = {name: 0.01 * value for name, value in state(n + 1).items()}
        wanted = {name: value + update[name] for name, value in wanted.items()}
        held = stream.advance({name: value + update[name] for name, value in held.items()})
    off, moved_by = ((one["w"] - wanted["w"]).norm() for one in (held, state(0)))
    assert float(off) < 0.4 * float(moved_by)


def test_without_feedback_it_is_in_the_difference_from_the_senders_own_model():
    stream, target, errors = Stream(1, feedback=False), moved(state(0), 1), []
    stream.advance(state(0))
    for n in range(6):
        held = stream.advance(target | {"norm.running_mean": target["norm.running_mean"] + n})
        errors.append(float((held["w"] - target["w"]).norm()))
    assert errors[-1] < errors[0] / 10


def test_who_missed_versions_gets_them_or_the_whole():
    stream, model = Stream(1), state(0, 20_000)
    model, late = stream.advance(model), Decoder()
    late.decode(stream.message("late"))
    stream.received("late", 1)
    sizes = []
    for _ in range(30):
        model = stream.advance({name: value + 0.01 * torch.randn_like(value) for name, value in model.items()})
        sizes.append(len(stream.message("late")))
    whole = len(stream.message("newcomer"))
    assert sizes[3] < whole / 4
    assert max(sizes) < 1.01 * whole
    assert sizes[-1] == whole
    assert equal(late.decode(stream.message("late")), model)


def test_a_model_that_has_nothing_in_common_is_sent_whole_and_exact():
    stream, decoder, other = Stream(0.5), Decoder(), state(99)
    stream.advance(state(0))
    decoder.decode(stream.message(0))
    stream.received(0, 1)
    held = stream.advance(other)
    assert all(torch.allclose(held[name], value, rtol=0, atol=2**-17) for name, value in other.items())
    assert equal(decoder.decode(stream.message(0)), held)


@pytest.mark.parametrize("other", [{"w": torch.zeros(3)}, {"v": torch.zeros(400)}, {"w": torch.zeros(400).half()}])
def test_another_model_is_sent_whole(other):
    stream, decoder = Stream(1), Decoder()
    stream.advance(state(0))
    decoder.decode(stream.message(0))
    stream.received(0, 1)
    stream.advance(other)
    assert equal(decoder.decode(stream.message(0)), other)
    assert decoder.version == 2


def test_arrays_travel_in_streams():
    stream, decoder, arrays = Stream(), Decoder(), [np.ones(3), np.arange(4)]
    stream.advance(arrays)
    decoder.decode(stream.message(0))
    stream.received(0, 1)
    arrays = [arrays[0] * 2, arrays[1]]
    stream.advance(arrays)
    for one, other in zip(decoder.decode(stream.message(0)), arrays, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_stream_resumes_from_its_state():
    stream, decoder = Stream(1), Decoder()
    model = stream.advance(state(0))
    decoder.decode(stream.message("a"))
    stream.received("a", 1)
    again = Stream(1)
    again.load(stream.state())
    assert (again.version, equal(again.held, model)) == (1, True)
    again.advance(moved(model, 5))
    assert equal(decoder.decode(again.message("a")), again.held)
    with pytest.raises(DecodeError):
        again.load(stream.state()[:-1])


def test_a_stream_that_forgot_all_is_told_from_the_one_before():
    """A server that starts again without its state counts versions from 1, too."""
    decoder, old, new = Decoder(), Stream(1), Stream(1)
    for n in range(3):
        old.advance(state(n))
    decoder.decode(old.message(0))
    for n in range(3):
        new.advance(state(n + 10))
    new.received(0, decoder.version)
    with pytest.raises(DecodeError) as refused:
        decoder.decode(new.message(0))
    assert refused.value.code == "base"


def test_states_may_be_changed_in_place_at_either_end():
    """As by an optimiser of a model that uses the very tensors."""
    stream, decoder, model = Stream(1), Decoder(), state(0)
    for _ in range(4):
        for value in stream.advance(model).values():
            value.add_(1)
        got = decoder.decode(stream.message(0))
        stream.received(0, decoder.version)
        assert equal(got, stream.held)
        for value in (*got.values(), *model.values()):
            value.mul_(1.01)


def test_tampered_messages_change_nothing():
    rng, stream, decoder = random.Random(1), Stream(1), Decoder()
    model = stream.advance(state(0))
    decoder.decode(stream.message(0))
    stream.received(0, 1)
    stream.advance(moved(model, 1))
    data = stream.message(0)
    for _ in range(1000):
        bad = bytearray(data)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        with pytest.raises(DecodeError):
            decoder.decode(bytes(bad))
    assert equal(decoder.decode(data), stream.held)


def test_a_stream_without_a_version_says_so():
    for ask in (lambda: Stream().held, lambda: Stream().message(0)):
        with pytest.raises(UserError, match="advance"):
            ask()


@pytest.mark.parametrize("folder", sorted(FRAMES.glob("[0-9]")), ids=lambda folder: folder.name)
def test_what_a_stream_wrote_once_is_read(folder):
    """Bytes that an earlier version wrote: every later one reads them."""
    decoder, seen = Decoder(), []
    for name in ("whole", "difference"):
        got = decoder.decode((folder / f"stream-{name}.frame").read_bytes())
        seen.append((decoder.version, float(got["layer.weight"].sum()), got["norm.num_batches_tracked"].item()))
    assert [version for version, *_ in seen] == [1, 2]
    exact = float(decode((folder / "tensors.frame").read_bytes())["layer.weight"].sum())
    assert abs(seen[0][1] - exact) < 1e-4  # on a grid of less than 2^-20 of the largest value
    assert abs(seen[1][1] - seen[0][1] - 48) < 10
    assert [count for *_, count in seen] == [7, 8]


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("folder", sorted(FRAMES.glob("[0-9]")), ids=lambda folder: folder.name)
def test_a_stream_that_an_earlier_version_saved_continues(folder, change):
    """A receiver that had missed two versions gets them in one frame, or each if the first message was lost."""
    stream, late, later = Stream(1), Decoder(), Decoder()
    stream.load((folder / "sender.state").read_bytes())
    for decoder in (late, later):
        decoder.load((folder / "late.state").read_bytes())
    assert (stream.version, late.version) == (3, 1)
    if change:
        stream.advance({n: v * 1.01 if v.is_floating_point() else v for n, v in stream.held.items()})
    for decoder, kind in ((late, "Merged"), (later, "Versions")):
        message = stream.message("late")
        assert Parsed(message).kind == kind
        assert equal(decoder.decode(message), stream.held)
        assert decoder.version == stream.version


LARGE = {
    "a mask": torch.triu(torch.full((60, 60), -1e9), 1),
    "a time": torch.tensor(1_764_000_000.0),
    "a double": torch.tensor(2.0**60, dtype=torch.float64),
    "an infinite mask": torch.triu(torch.full((9, 9), -torch.inf), 1),
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", LARGE)
def test_a_large_constant_does_not_destroy_what_is_rounded_beside_it(kind, known):
    model = state(1) | {"constant": LARGE[kind]}
    first = model if known else None
    stream, decoder = Stream(1.0, first=first), Decoder(first=first)
    for n in range(4):
        held = stream.advance(model)
        assert equal(decoder.decode(stream.message("a")), held)
        stream.received("a", decoder.version)
        assert torch.equal(held["constant"], LARGE[kind])
        assert torch.dist(held["w"], model["w"]) < 0.02 * model["w"].norm()
        model = moved({name: held[name] for name in state(1)}, n) | {"constant": LARGE[kind]}
    assert equal(Decoder(first=first).decode(stream.message("late")), held)


def test_a_large_value_that_grows_later_does_not_destroy_the_others():
    stream, model = Stream(1.0), state(1) | {"scale": torch.ones(2)}
    for peak in (1.0, 1e9, 1e9):
        held = stream.advance(model | {"scale": torch.full((2,), peak)})
    assert torch.equal(held["scale"], torch.full((2,), 1e9))
    assert torch.dist(held["w"], model["w"]) < 0.01 * model["w"].norm()


def test_averages_of_integers_stay_exact():
    stream, decoder = Stream(0.5), Decoder()
    model = state(1) | {"seen": torch.tensor([7, 0, 90]), "mask": torch.tensor([True, False])}
    for n in range(5):
        held = stream.advance(model)
        assert equal(decoder.decode(stream.message("a")), held)
        stream.received("a", decoder.version)
        assert all(torch.equal(held[name], model[name]) for name in ("seen", "mask"))
        restarted = Stream(0.5)
        restarted.load(stream.state())
        stream = restarted
        averages = {"seen": model["seen"].double() + 16.25 * n, "mask": model["mask"].double()}  # as Flower makes them
        model = moved({name: held[name] for name in state(1)}, n) | averages


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (torch.nn.Linear(2, 2), "first is a model"),
        (lambda: torch.nn.Linear(2, 2), "first must be weights"),
        (lambda: None, "first must be weights"),
        ("weights.safetensors", "first must be weights"),
        ({"w": 1.0}, "first must be weights.*'w'"),
    ],
)
def test_first_weights_that_are_not_weights_are_named(first, words):
    with pytest.raises(UserError, match=words):
        first_state(first)
