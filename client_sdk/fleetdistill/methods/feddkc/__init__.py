"""FedDKC: its configuration and the device half."""
