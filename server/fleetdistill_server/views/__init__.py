"""Views of a store's runs for the command line and scripts. May import `store`, `security` and `service`."""
