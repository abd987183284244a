"""Answers held to a grammar, with `llguidance`: which grammars can be used, and which tokens may
come next. Jax-free.
"""
