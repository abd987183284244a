"""Measuring: traffic sent over HTTP or into an engine in this process, the policies side by side,
and reports.
"""
