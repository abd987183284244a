"""OpenAI's Responses API: conversations of items, stored by the server."""
