"""Relevance of documents to a query: /rerank and /score."""
