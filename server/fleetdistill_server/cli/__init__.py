"""The command line: options in, one call, a table or JSON out."""
