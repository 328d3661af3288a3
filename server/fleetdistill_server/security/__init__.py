"""Certificates, enrolment tokens and revocations. May import `store`."""
