"""Model directories of each library: read, written side by side, and verified; the Hub."""
