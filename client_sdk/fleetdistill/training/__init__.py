"""PyTorch: models, losses, training loops, ONNX export. Imports `state` and `wire`."""
