"""OpenAI's routes: completions, chat completions and embeddings."""
