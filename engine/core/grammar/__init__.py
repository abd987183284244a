"""Grammars for answers, with `llguidance`: checks, compilation and token masks. Imports no jax."""
