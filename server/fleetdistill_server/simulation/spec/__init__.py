"""Describes what to simulate: settings, plan, devices and attacks."""
