"""The MCP face over runner: tools, resources and prompts for coding agents."""
