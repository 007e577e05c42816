"""A load generator for any server that speaks OpenAI's API. Knows nothing of the engine."""
