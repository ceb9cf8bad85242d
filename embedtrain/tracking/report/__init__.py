"""The report of one run or several: one HTML file that opens without a network."""
