"""CDKT-FL: configuration and device half."""
