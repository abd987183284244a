"""The OpenAI-compatible HTTP generation endpoint. Never imports jax: it talks to the core through
`EngineClient`.
"""

from jitney.engine.api.app import create_app
from jitney.engine.api.service import Service
from jitney.engine.api.settings import ServerSettings, digest_key

__all__ = ["ServerSettings", "Service", "create_app", "digest_key"]
