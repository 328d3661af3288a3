"""Views of a store's runs for the command line and scripts.

Modules of this package may import `store`, `security` and `service`.
"""
