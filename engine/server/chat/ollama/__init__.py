"""Ollama's API: chats, prompts, vectors, and what it says of the served model."""
