"""A run as rows for people and scripts. Imports `store`, `security` and `service`."""
