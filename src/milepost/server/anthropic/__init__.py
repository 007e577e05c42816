"""Anthropic's Messages API over the same engine: its requests become chat requests."""
