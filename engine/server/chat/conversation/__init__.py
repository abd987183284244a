"""Parsing of a model's turn into thoughts, content and tool calls; grammars of its form."""
