"""DaFKD, the server half: the rounds, and the weights of the ensemble."""
