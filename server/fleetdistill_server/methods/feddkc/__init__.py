"""FedDKC, the server half: the rounds, and the refinement of knowledge."""
