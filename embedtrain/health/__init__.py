"""Whether this machine is fit: what is measured of it, and what to do where something is not as it should be."""
