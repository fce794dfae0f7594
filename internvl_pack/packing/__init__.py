"""Which fragments share a row: budgets, packers, splitting, bounds, simulation.

Imports neither torch nor transformers.
"""
