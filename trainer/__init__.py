"""What runs on a GPU host: one editable script and the fixed files around it."""
