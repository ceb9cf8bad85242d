"""What every package uses: files, limits, records, text, checksums, the Hub."""
