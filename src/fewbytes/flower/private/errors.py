"""Flower's error codes, and which of its errors mean that a node is away."""

from __future__ import annotations

from flwr.app import Error
from flwr.common.constant import ErrorCode

APP_RAISED, APP_REFUSED = ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.INVALID_FAB
NODE_UNAVAILABLE = ErrorCode.NODE_UNAVAILABLE


def away(error: Error) -> str:
    """How a node is away, if the error means that; else empty."""
    if error.code == NODE_UNAVAILABLE:
        return "its node has gone, or has been silent for a minute"
    if error.code == ErrorCode.MESSAGE_UNAVAILABLE and "upload" in (error.reason or ""):
        return "its reply broke off three minutes ago: its node has gone"
    return ""
