"""The recipe as dataclasses, its checks, and the Hydra glue. Imports no torch."""
