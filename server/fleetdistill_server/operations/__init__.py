"""Reads and operates a server for people: its store on this machine, or the server from elsewhere."""
