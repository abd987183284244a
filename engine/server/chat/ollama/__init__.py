"""Ollama's API: chats, prompts, embeddings, and facts of the served model."""
