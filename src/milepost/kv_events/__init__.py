"""Tells routers what a prompt would hit here, in the messages of vLLM's KV events."""

from milepost.kv_events.messages import Messages
from milepost.kv_events.publisher import EventPublisher

__all__ = ["EventPublisher", "Messages"]
