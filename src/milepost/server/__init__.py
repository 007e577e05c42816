"""The OpenAI-compatible HTTP server, in front of an engine process."""
