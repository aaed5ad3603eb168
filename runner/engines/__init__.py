"""What places and starts runs: one interface, five engines."""
