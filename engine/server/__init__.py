"""One engine over HTTP: the OpenAI, Anthropic and Ollama APIs, batches and jobs, and the management
of the engine's process. Does not import jax.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
