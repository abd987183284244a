"""One engine over HTTP: the OpenAI, Anthropic and Ollama APIs, batches and jobs, and the process
that holds the engine. Imports no jax.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
