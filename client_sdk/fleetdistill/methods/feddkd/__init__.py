"""FedDKD: its configuration and the device half."""
