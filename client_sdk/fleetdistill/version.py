"""The installed version of the distribution."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("fleetdistill")
except PackageNotFoundError:  # a source tree that is not installed
    VERSION = "0"
