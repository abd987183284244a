"""Parsing of a model's turn into thoughts, content and tool calls, and the grammars that force its
form.
"""
