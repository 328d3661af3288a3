"""Runs the controls that a fleet is compared with: local-only training and FedAvg."""
