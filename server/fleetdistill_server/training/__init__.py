"""Training and inference of the server halves on the engine's hardware."""
