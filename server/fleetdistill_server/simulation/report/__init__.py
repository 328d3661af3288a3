"""The report of a simulation: figures, tables, pictures."""
