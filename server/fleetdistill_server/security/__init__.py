"""Certificates, enrolment tokens and revocations. Modules of this package may import `store`."""
