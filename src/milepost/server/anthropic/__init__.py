"""Anthropic's Messages API: its bodies, their conversion to chat requests, and its endpoints."""
