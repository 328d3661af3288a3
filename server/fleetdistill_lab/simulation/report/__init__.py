"""Computes a simulation's figures and writes its report, tables and plots."""
