"""Jobs: single requests whose clients do not wait on the line."""
