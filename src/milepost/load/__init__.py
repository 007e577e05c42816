"""A load generator for any server with OpenAI's API. It knows nothing of the engine."""
