"""The terminal face over runner: a pure view of a snapshot taken once a second."""
