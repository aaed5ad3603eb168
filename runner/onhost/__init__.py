"""Copied to hosts as they are: standard library only, Python 3.8 or later."""
