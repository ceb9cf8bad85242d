"""Which rows form batch k."""
