"""OpenAI's Responses API over the same engine: its requests become chat requests."""
