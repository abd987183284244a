"""Models composed of other models: cascades, ensembles and pipelines."""
