"""What is wrong now, by kind: a trouble is over when the same thing succeeds."""

from __future__ import annotations


class Troubles:
    """The newest text of each kind ("snapshot", "recovery", "loading", "daemon"), newest last."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    @property
    def newest(self) -> str | None:
        """The newest trouble that is not over; None when all is well."""
        return next(reversed(list(self._texts.values())), None)

    def note(self, about: str, text: str) -> bool:
        """It is wrong again; whether this is news, and not the same trouble every second."""
        known = self._texts.pop(about, None)
        self._texts[about] = text
        return known != text

    def over(self, about: str) -> None:
        """It went well."""
        self._texts.pop(about, None)
