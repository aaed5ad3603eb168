"""The pages of the control room, by name."""

from __future__ import annotations

from .page import Page


def make_page(name: str) -> Page:
    """A top page; built when first asked for."""
    from . import events, hosts, lineage, runs, waves

    makers: dict[str, type[Page]] = {
        "runs": runs.RunsPage,
        "waves": waves.WavesPage,
        "hosts": hosts.HostsPage,
        "events": events.EventsPage,
        "lineage": lineage.LineagePage,
    }
    return makers[name]()
