"""embedtrain: train text-embedding models on one GPU, one node or many nodes, exactly and restartably."""

__version__ = "0.1.0"
