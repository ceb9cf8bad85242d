"""The recipe: dataclasses, checks and Hydra composition. Imports no torch."""
