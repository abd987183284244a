"""The OpenAI-compatible HTTP generation endpoint. Never imports jax: it talks to the core through
`EngineClient`.
"""
