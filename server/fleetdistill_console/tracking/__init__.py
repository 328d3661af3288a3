"""Copies a run's figures to MLflow and TensorBoard, in a process of its own that only reads the store.

Modules of this package may import `views`, `store`, `service` and `engine.export`.
"""
