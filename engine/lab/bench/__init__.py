"""Benchmarks: traffic over HTTP or in this process, comparison of policies, and reports."""
