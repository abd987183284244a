"""The engine: scheduler, KV pages, step programs, models, weights, text, grammars. No HTTP."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
