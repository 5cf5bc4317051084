"""What every benchmark uses: the machine's label, processor time, tables with goals, a fleet in one process."""
