"""The page where you watch the seats: a Starlette sub-application beside the HTTP endpoint."""

from jitney.dashboard.app import create_dashboard, dashboard_routes

__all__ = ["create_dashboard", "dashboard_routes"]
