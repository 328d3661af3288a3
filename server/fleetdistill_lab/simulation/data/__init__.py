"""Loads data sets and partitions them over devices."""
