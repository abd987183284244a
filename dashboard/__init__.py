"""The live page of an engine or a fleet: a Starlette application beside the HTTP endpoint."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
