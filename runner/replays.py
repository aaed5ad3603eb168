"""Every write once: the same request_id of the same asker answers as it did before, and changes nothing a second time.

Ids belong to whoever asks ("cli", "tui", "mcp:NAME"): two agents that both count from 1 do not get each other's answers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable

from runner.errors import BadValue, Refused
from runner.lab import Lab
from runner.records import Json, Submitted

WHO_FORM = re.compile(r"(cli|tui|daemon|mcp:.{1,64})")
REQUEST_ID_CHARS = 128
REQUEST_ID_FORM = re.compile(rf"[\x21-\x7e]{{1,{REQUEST_ID_CHARS}}}")


def answered(lab: Lab, who: str, request_id: str | None) -> bool:
    """Whether this asker's request was answered before."""
    return request_id is not None and _earlier(lab, who, request_id) is not None


def once(lab: Lab, request_id: str | None, verb: str, who: str, asked_for: object, act: Callable[[], Json]) -> tuple[Json, bool]:
    """(what `act` returned, whether that was an earlier time): one transaction, once for each request_id of an asker.

    `asked_for` tells a repetition from another request with the same id; what `act` returns holds `run_ids`. Raised: BadValue, Refused.
    """
    digest = hashlib.sha256(repr((verb, asked_for)).encode("utf-8", "replace")).hexdigest()
    if not WHO_FORM.fullmatch(who):
        raise BadValue(f"{who!r} is not a name for who asks.")
    if request_id is not None and not REQUEST_ID_FORM.fullmatch(request_id):
        raise BadValue(f"A request_id is 1 to {REQUEST_ID_CHARS} printable characters without spaces.", next_step="A UUID will do.")
    with lab.syncing_sources(), lab.store.transaction():
        earlier = None if request_id is None else _earlier(lab, who, request_id)
        if earlier is not None:
            known = dict(earlier[1])
            if earlier[0] != verb or known.pop("digest", digest) != digest:
                raise Refused(
                    f"Your request_id {request_id} was used for another request ({earlier[0]}: {', '.join(known['run_ids'][:3])}).",
                    next_step="Use a new one for each request; the same one only to repeat a request whose answer was lost.",
                )
            return known, True
        done = act()
        if request_id is not None:
            lab.store.remember(_key(who, request_id), verb, {**done, "digest": digest})
        return done, False


def submitted_once(lab: Lab, request_id: str | None, verb: str, who: str, asked_for: object, act: Callable[[], Submitted]) -> Submitted:
    """`once` for what queues runs."""

    def queued() -> Json:
        done = act()
        return {"run_ids": done.run_ids, "wave_id": done.wave_id, "notes": done.notes}

    known, replay = once(lab, request_id, verb, who, asked_for, queued)
    return Submitted(**known, replay=replay)


def _key(who: str, request_id: str) -> str:
    return f"{who} {request_id}"  # a request_id holds no space


def _earlier(lab: Lab, who: str, request_id: str) -> tuple[str, Json] | None:
    """The answer of before; labs of the first schema kept ids without whose they were."""
    return lab.store.replay(_key(who, request_id)) or lab.store.replay(request_id)
