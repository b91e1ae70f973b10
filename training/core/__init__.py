"""What every room stands on: errors, files, paths, locks, units, logging, progress and the report block."""
