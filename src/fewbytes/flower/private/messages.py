"""What messages say of themselves: Flower sets it, and has no documented way to change it."""

from __future__ import annotations

from flwr.app import Error, Message
from flwr.supercore.task_identity import TaskIdentity


def in_reply_to(reply: Message, message_id: str) -> None:
    """Let a reply answer the message that the strategy knows, which was sent again under another id."""
    vars(reply.metadata)["_reply_to_message_id"] = message_id


def failed(reply: Message, error: Error) -> Message:
    """An error in place of a reply."""
    return Message(error=error, metadata=reply.metadata)  # type: ignore[call-overload, no-any-return]


def in_no_task() -> None:
    """Let messages be made in a process that Flower has not started: they then name the task, run and node 0."""
    for name in ("task_id", "run_id", "node_id"):
        if getattr(TaskIdentity, f"_{name}") is None:
            setattr(TaskIdentity, name, 0)
