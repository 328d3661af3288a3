"""Version of the installed package."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("fleetdistill")
except PackageNotFoundError:  # running from a source tree that is not installed
    VERSION = "0"
