"""FedD2S: its configuration and the device half."""
