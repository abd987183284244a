"""Measuring: traffic over HTTP or in this process, the policies side by side, and reports."""
