"""A pretended CUDA device, so that the CUDA branches run on a machine without a GPU; see device.py."""
