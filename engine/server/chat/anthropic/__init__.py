"""Anthropic's Messages API: the same conversations, in blocks."""
