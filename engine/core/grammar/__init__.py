"""Answers held to a grammar: what a grammar is, whether it can be used, and which tokens may come
next.

Free of jax; `llguidance` knows the languages and computes the masks.
"""
