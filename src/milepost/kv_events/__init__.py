"""Tells routers what a prompt would hit here, in the messages that vLLM's publish."""

from milepost.kv_events.messages import Messages
from milepost.kv_events.publisher import EventPublisher

__all__ = ["EventPublisher", "Messages"]
