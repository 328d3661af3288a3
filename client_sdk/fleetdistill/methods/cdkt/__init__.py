"""CDKT-FL: its configuration and the device half."""
