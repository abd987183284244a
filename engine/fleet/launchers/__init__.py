"""Starts the engines of a fleet: as local processes or on Ray."""
