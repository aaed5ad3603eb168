"""The owner of all state: store, verbs, daemon, engines and the command line. No screen, no torch, no MCP in here."""
