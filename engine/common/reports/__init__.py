"""Reports: figures, tables, and one page that needs no network."""
