"""How the engines of a fleet are started: as local processes or on Ray."""
