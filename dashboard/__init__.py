"""The page where you watch the seats: a Starlette sub-application beside the HTTP endpoint."""

from jitney.dashboard.app import create_dashboard, dashboard_routes, with_page

__all__ = ["create_dashboard", "dashboard_routes", "with_page"]
