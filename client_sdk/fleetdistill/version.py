"""Version of the package; pyproject.toml reads it from this file.

A literal, because `importlib.metadata` would take a tenth of the time of importing `Device`.
"""

__all__ = ["VERSION"]

VERSION = "0.1.0"
