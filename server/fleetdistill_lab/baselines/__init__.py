"""Baselines of the papers' tables, each a configuration and two halves in a module of its own.

They are methods like any other: `fleetdistill simulate --method fedprox`, or `method = "fedprox"` in run.toml. A module
is imported when a process needs its method (`[project.entry-points."fleetdistill.methods"]` in pyproject.toml).
"""
