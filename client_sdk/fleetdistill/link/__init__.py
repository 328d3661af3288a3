"""The connection to a server: gRPC, downloads and enrolment. Imports `state` and `wire`."""

from fleetdistill.link.base import Link

__all__ = ["Link"]
