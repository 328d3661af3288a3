"""Command line: each command parses options, makes one call, and prints a table or JSON."""
