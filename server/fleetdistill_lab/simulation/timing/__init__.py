"""Simulated time: when devices are available, how long they work, and the order in which they answer."""
