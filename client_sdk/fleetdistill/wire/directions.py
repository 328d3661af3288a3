"""Limits of the directions in class statistics; devices apply them and the front checks them."""

from __future__ import annotations

ROWS_PER_DIRECTION = 10
"""Fewest samples per direction with which the server cannot recognise single samples."""
MIN_ROWS_PER_DIRECTION = 2
"""Smallest number of samples per direction that a configuration can set."""
