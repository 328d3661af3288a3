"""How a model leaves training: versions, limits and quantisation of the exported model, and prediction with it."""
