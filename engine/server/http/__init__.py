"""HTTP: connections, access, limits, errors, metrics, and the routes common to all API families."""
