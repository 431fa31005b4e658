"""What the core itself implements."""
