"""Differential privacy of one release: accountant and noise. Standard library only, so that every device can use it."""
