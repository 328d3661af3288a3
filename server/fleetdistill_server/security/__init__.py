"""Certificates, tokens and revocations. Imports `store`."""
