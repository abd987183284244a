"""Types and helpers for every house: requests, outputs, messages, records, errors."""
