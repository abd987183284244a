"""OpenAI's Responses API: conversations of items, which the server keeps."""
