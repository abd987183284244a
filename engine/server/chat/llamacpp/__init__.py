"""Texts, tokens and templates by themselves, in vLLM's and llama.cpp's forms."""
