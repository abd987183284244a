"""How well documents fit a query: /rerank and /score."""
