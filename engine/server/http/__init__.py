"""HTTP: connections, access, limits, errors, metrics and the routes that no API family has."""
