"""The command line. Each command parses options, makes one call, and prints a table or JSON."""
