"""Widgets of the control room, each with its bindings and messages beside it."""
