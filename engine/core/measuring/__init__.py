"""For those who measure or predict: an engine on a virtual device, or with random weights."""
