"""`python -m mcp_server`: serve a lab to a coding agent over stdio or HTTP."""

from __future__ import annotations

import argparse
import sys

from mcp_server.server import main


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mcp_server", description="Serve an Overnight lab to coding agents (MCP).")
    parser.add_argument("--lab", help="the lab's folder (default: OVERNIGHT_LAB, else lab/ beside the nearest hosts.toml)")
    parser.add_argument("--http", metavar="HOST:PORT", help="serve Streamable HTTP there instead of stdio; always needs the lab's token")
    parser.add_argument("--agent", metavar="NAME", help="name for the audit trail (default: what the client calls itself)")
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="another Host name that HTTP clients may use")
    parser.add_argument("--no-daemon", action="store_true", help="do not start the lab's daemon; runs wait until somebody does")
    return parser


if __name__ == "__main__":
    args = arguments().parse_args()
    sys.exit(main(args.lab, args.http, agent=args.agent, allow_hosts=args.allow_host, start_daemon=not args.no_daemon))
