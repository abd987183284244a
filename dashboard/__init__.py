"""The page where you watch the seats: a Starlette sub-application beside the HTTP endpoint."""

from jitney.dashboard.app import Dashboard

__all__ = ["Dashboard"]
