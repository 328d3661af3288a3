"""Simulates a fleet on one machine with the real engine, store, messages and devices, and compares it with controls."""
