"""Predictions before a launch: the memory of each rank."""
