"""Secure sums on the server: it unmasks the devices' sum and checks whether it can be one."""
