"""Tells routers how much of a prompt is cached here, in vLLM's KV event messages."""

from milepost.kv_events.messages import MessageWriter
from milepost.kv_events.publisher import EventPublisher, open_publisher

__all__ = ["EventPublisher", "MessageWriter", "open_publisher"]
