"""What a reply says of itself: Flower sets it, and has no documented way to change it."""

from __future__ import annotations

from flwr.app import Error, Message


def in_reply_to(reply: Message, message_id: str) -> None:
    """Let a reply answer the message that the strategy knows, which was sent again under another id."""
    vars(reply.metadata)["_reply_to_message_id"] = message_id


def failed(reply: Message, error: Error) -> Message:
    """An error in place of a reply."""
    return Message(error=error, metadata=reply.metadata)  # type: ignore[call-overload, no-any-return]
