"""The page of keys in docs/ comes from the bindings: what is bound is on it, once, with words."""

from __future__ import annotations

from textual.binding import Binding

from tests.keys_page import PAGE, owners, page


def test_the_page_is_the_bindings_in_force() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.keys_page"


def test_no_key_is_bound_twice_in_one_place_and_none_is_without_words() -> None:
    room = owners()["ControlRoom"]
    always = {key for b in room.BINDINGS if isinstance(b, Binding) for key in b.key.split(",")}
    for name, owner in owners().items():
        keys = [key for b in owner.BINDINGS if isinstance(b, Binding) for key in b.key.split(",")]
        assert len(keys) == len(set(keys)), name
        assert all(b.description for b in owner.BINDINGS if isinstance(b, Binding)), name
        if name.endswith(("Page", "Dashboard")) and name not in ("KeysPage",):
            assert not always & set(keys), (name, always & set(keys))
