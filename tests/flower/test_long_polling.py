"""Requests for messages that are held, over a small application that hands out messages as Flower's SuperLink does."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from types import SimpleNamespace

import pytest

from fewbytes.flower import long_polling
from fewbytes.flower.long_polling import TIMES, LongPolling

ASKED, CONFIRMED, LEFT, REMOVED, OTHER = "/asked", "/confirmed", "/left", "/removed", "/other"
KNOWN = "known"  # what the header says of a node that may ask


def said(body: bytes) -> list:
    try:
        return json.loads(body)
    except ValueError:
        raise ValueError("nothing is said") from None


SPEECH = SimpleNamespace(
    ASKED=ASKED, CONFIRMED=CONFIRMED, LEFT=LEFT, REMOVED=REMOVED,
    node_of=lambda body: said(body)[0],
    message_in=lambda body: body.decode(),
    confirmed=lambda body: tuple(said(body)),
    nodes_for=lambda body: [node for node, _ in said(body)],
)  # fmt: skip


class Link:
    """An application that gives each message once, to who is known; how often it was asked."""

    def __init__(self) -> None:
        self.messages, self.asked, self.over, self.removed = defaultdict(list), 0, False, list[int]()

    async def __call__(self, scope, receive, send):
        event = await receive()
        status, answer = 401, b""
        if scope["headers"] == [(b"who", KNOWN.encode())] and event["body"]:
            status = 200
            if scope["path"] == ASKED:
                self.asked += 1
                node = said(event["body"])[0]
                waiting = self.messages[node]
                status, answer = 401 if node in self.removed else 200, waiting.pop(0).encode() if waiting else b""
            elif scope["path"] == REMOVED:
                self.removed += said(event["body"])
            elif scope["path"] == CONFIRMED:
                status = 403 if self.over else 200
            elif scope["path"] == LEFT:
                for node, message in said(event["body"]):
                    self.messages[node].append(message)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": answer})


class Asking:
    """A request: its status and body once they are there; `go` breaks its connection."""

    def __init__(self, app: LongPolling, path: str, body: object, who: str = KNOWN, whole: bool = True) -> None:
        self._gone, self._unread, self.sent = asyncio.Event(), True, []
        content = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def receive():
            if self._unread:
                self._unread = False
                return {"type": "http.request", "body": content, "more_body": not whole}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(event):
            self.sent.append(event)

        scope = {"type": "http", "path": path, "headers": [(b"who", who.encode())]}
        self.task = asyncio.ensure_future(app(scope, receive, send))

    async def answer(self, seconds: float = 5) -> tuple[int, str] | None:
        await asyncio.wait_for(self.task, seconds)
        return (self.sent[0]["status"], self.sent[1]["body"].decode()) if self.sent else None

    async def go(self) -> None:
        self._gone.set()
        await asyncio.wait_for(self.task, 5)

    async def waits(self) -> bool:
        for _ in range(20):
            await asyncio.sleep(0)
        return not self.task.done()


def tried(test):
    """Run a coroutine function over a new link."""

    def run(*arguments):
        link = Link()
        asyncio.run(test(link, LongPolling(link, SPEECH), *arguments))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@tried
async def test_who_asks_waits_until_there_is_a_message(link, app):
    first, other = Asking(app, ASKED, [1]), Asking(app, ASKED, [2])
    assert await first.waits()
    assert await other.waits()
    before = link.asked
    assert await Asking(app, LEFT, [(1, "a")]).answer() == (200, "")
    assert await first.answer() == (200, "a")
    assert await other.waits()
    assert link.asked == before + 1  # nobody asks in vain
    await other.go()


@tried
async def test_a_message_that_came_before_is_given_at_once(link, app):
    await Asking(app, LEFT, [(1, "a")]).answer()
    assert await Asking(app, ASKED, [1]).answer() == (200, "a")


@tried
async def test_a_message_is_given_again_until_it_is_confirmed(link, app):
    await Asking(app, LEFT, [(1, "a")]).answer()
    for _ in range(2):
        assert await Asking(app, ASKED, [1]).answer() == (200, "a")
    await Asking(app, CONFIRMED, [1, "a"]).answer()
    again = Asking(app, ASKED, [1])
    assert await again.waits()
    await again.go()


@tried
async def test_a_message_of_a_run_that_is_over_is_not_given_again(link, app):
    await Asking(app, LEFT, [(1, "a")]).answer()
    await Asking(app, ASKED, [1]).answer()
    link.over = True
    await Asking(app, CONFIRMED, [1, "a"]).answer()
    again = Asking(app, ASKED, [1])
    assert await again.waits()
    await again.go()


@tried
async def test_a_message_that_nobody_can_take_is_given_so_often_and_no_more(link, app):
    await Asking(app, LEFT, [(1, "a")]).answer()
    for _ in range(TIMES):
        assert await Asking(app, ASKED, [1]).answer() == (200, "a")
    again = Asking(app, ASKED, [1])
    assert await again.waits()
    await Asking(app, LEFT, [(1, "b")]).answer()
    assert await again.answer() == (200, "b")


@tried
async def test_a_late_word_about_an_earlier_message_leaves_the_next_one(link, app):
    await Asking(app, LEFT, [(1, "a"), (1, "b")]).answer()
    for message in "ab":
        assert await Asking(app, ASKED, [1]).answer() == (200, message)
    await Asking(app, CONFIRMED, [1, "a"]).answer()
    assert await Asking(app, ASKED, [1]).answer() == (200, "b")


@pytest.mark.parametrize("body", [[1, "a"], [1, ""], b"", b"none"])
@pytest.mark.parametrize("path", [CONFIRMED, ASKED])
def test_a_stranger_gets_nothing_and_takes_nothing_away(path, body):
    async def test(link, app):
        await Asking(app, LEFT, [(1, "a")]).answer()
        assert await Asking(app, ASKED, [1]).answer() == (200, "a")
        assert (await Asking(app, path, body, who="stranger").answer())[0] == 401  # at once
        assert await Asking(app, ASKED, [1]).answer() == (200, "a")

    tried(test)()


@tried
async def test_of_strangers_nothing_is_kept(link, app):
    for node in range(50):
        await Asking(app, ASKED, [node], who="stranger").answer()
    assert not app._nodes


@tried
async def test_a_stranger_who_asks_in_a_nodes_name_delays_nothing(link, app):
    waiting = Asking(app, ASKED, [1])
    assert await waiting.waits()
    left = Asking(app, LEFT, [(1, "a")])
    strangers = [Asking(app, ASKED, [1], who="stranger") for _ in range(5)]
    assert await waiting.answer(1) == (200, "a")
    assert {(await each.answer())[0] for each in strangers} == {401}
    await left.answer()


@tried
async def test_who_has_gone_is_not_waited_for_and_its_message_is_not_lost(link, app):
    first = Asking(app, ASKED, [1])
    assert await first.waits()
    await first.go()
    assert not first.sent
    await Asking(app, LEFT, [(1, "a")]).answer()
    assert await Asking(app, ASKED, [1]).answer() == (200, "a")


@tried
async def test_a_node_that_asks_anew_has_one_request_and_gets_what_went_to_the_old_one(link, app):
    """A link may be broken without anybody being told."""
    old = Asking(app, ASKED, [1])
    assert await old.waits()
    new = Asking(app, ASKED, [1])
    assert await old.answer() == (200, "")
    assert await new.waits()
    await Asking(app, LEFT, [(1, "a")]).answer()
    assert await new.answer() == (200, "a")
    many = [Asking(app, ASKED, [2]) for _ in range(50)]
    for each in many:
        await each.waits()
    assert sum(not each.task.done() for each in many) == 1
    await many[-1].go()


@tried
async def test_a_request_that_breaks_off_is_not_taken_for_a_whole_one(link, app):
    for path in (ASKED, CONFIRMED, LEFT):
        cut = Asking(app, path, [[1, "a"]], whole=False)
        assert await cut.waits()
        await cut.go()
        assert not cut.sent
    assert not link.messages


def test_a_request_is_held_for_a_while_only(monkeypatch):
    monkeypatch.setattr(long_polling, "HOLD_SECONDS", 0.05)

    async def test(link, app):
        assert await Asking(app, ASKED, [1]).answer() == (200, "")

    tried(test)()


@tried
async def test_a_removed_node_learns_so_at_once_and_the_others_wait_on(link, app):
    removed, other = Asking(app, ASKED, [1]), Asking(app, ASKED, [2])
    assert await removed.waits()
    assert await other.waits()
    assert await Asking(app, REMOVED, [1]).answer() == (200, "")
    assert await removed.answer() == (401, "")
    assert await other.waits()
    await other.go()


@tried
async def test_other_requests_pass(link, app):
    assert (await Asking(app, OTHER, b"x").answer())[0] == 200
    assert await Asking(app, ASKED, b"nothing").waits() is False
