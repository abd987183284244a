"""Batches and jobs: requests that are stored and answered in the background."""
