"""Batches and jobs: requests that the server keeps and answers later."""
