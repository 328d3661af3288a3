"""The connection to a server: gRPC, downloads, enrolment. Imports `state` and `wire`."""

from fleetdistill.link.base import Link

__all__ = ["Link"]
