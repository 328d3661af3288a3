"""Secure sums: the server learns the sum of the devices' numbers, and not one device's.

Needs the package `cryptography` (extra `tls`). Nothing here reads a clock, draws randomness or keeps state: all that a
device sends follows from its root, its numbers and what it is sent.
"""
