"""The command-line commands of the lab."""
