"""FedD2S, the server half: the rounds, and the schedule of dropped layers."""
