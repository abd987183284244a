"""Files and batches of requests: kept on disk, worked on in the background, answered in a file."""
