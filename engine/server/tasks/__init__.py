"""Batches and jobs: requests that the server stores and answers later."""
