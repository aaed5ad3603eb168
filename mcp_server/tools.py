"""The twelve tools, in the order an agent meets them, with the hints clients show to humans."""

from __future__ import annotations

from typing import Any

from mcp_server.calls import LabTool
from mcp_server.deciding import cancel, decide
from mcp_server.reads import get_metrics, get_run, leaderboard, list_gpus, list_runs, read_log
from mcp_server.submitting import run_experiment, submit_wave
from mcp_server.waiting import wait_for_results
from mcp_server.waves import analyze_wave

TEXT = {"type": "string"}
COUNT = {"type": "integer"}
TABLE = {"type": "object", "properties": {"columns": {"type": "array"}, "rows": {"type": "array"}}, "required": ["columns", "rows"]}


def shape(required: list[str], **properties: Any) -> dict[str, Any]:
    """The schema of an answer: what is always there, and the line on the lab that ends it."""
    return {"type": "object", "properties": {**properties, "lab": TEXT}, "required": [*required, "lab"]}


SUBMITTED = shape(["phase", "outlook"], id=TEXT, wave=TEXT, phase=TEXT, outlook=TEXT, runs=TABLE)
WAITED = shape(["new", "pending", "results", "cursor"], new=COUNT, pending=COUNT, results=TABLE, cursor=TEXT)


def all_tools() -> list[LabTool]:
    """One tool per verb of the research loop. A write is idempotent when request_id is given, or by nature (cancel)."""
    return [
        LabTool.make(list_gpus, title="List GPUs", writes=False),
        LabTool.make(run_experiment, title="Run one experiment", writes=True, idempotent=False, output=SUBMITTED),
        LabTool.make(submit_wave, title="Submit a wave", writes=True, idempotent=False, output=SUBMITTED),
        LabTool.make(wait_for_results, title="Wait for results", writes=False, output=WAITED),
        LabTool.make(get_metrics, title="Training curves", writes=False),
        LabTool.make(leaderboard, title="Leaderboard", writes=False),
        LabTool.make(list_runs, title="List runs", writes=False),
        LabTool.make(get_run, title="One run", writes=False),
        LabTool.make(read_log, title="Read a run's log", writes=False),
        LabTool.make(analyze_wave, title="Analyse a wave", writes=False),
        LabTool.make(decide, title="Decide about a run", writes=True, idempotent=False),
        LabTool.make(cancel, title="Cancel runs", writes=True, destructive=True),
    ]


TOOL_NAMES = tuple(tool.name for tool in all_tools())
