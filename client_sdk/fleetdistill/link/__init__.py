"""The connection to a server: gRPC, downloads and enrolment."""

from fleetdistill.link.base import Link

__all__ = ["Link"]
