"""embedtrain: train text-embedding models on one GPU, one node or many nodes."""

__version__ = "0.1.0"
