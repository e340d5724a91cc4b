"""One tree of errors, sorted by whose fault it is.

Every message says what happened, whose fault it is, and what to do. `exit_code` is what `swarm-node` exits with.
"""

from __future__ import annotations


class HotswarmError(Exception):
    """Root of everything that hotswarm raises on purpose."""

    exit_code = 1


class ConfigError(HotswarmError):
    """The caller gave a setting that cannot work. `field` names it."""

    exit_code = 2

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class LocalFailure(HotswarmError):
    """This machine could not do it: disk, memory, permissions. No peer is to blame."""


class StoreError(LocalFailure):
    """The local snapshot store could not read or write."""


class LockedError(StoreError):
    """Another process owns this state directory or port."""

    exit_code = 11


class IntegrityError(StoreError):
    """Bytes on this machine do not match their digest."""

    exit_code = 13


class ManifestError(HotswarmError):
    """A manifest is malformed, wrongly signed, or past a limit; the message names which. Its maker is to blame."""

    exit_code = 13


class NewerFormat(ManifestError):
    """A manifest in a format that only a later version of hotswarm reads. It is not damaged."""


class CaptureError(LocalFailure):
    """The training state holds something that cannot be captured; the message names its path and type."""


class HalfRestored(LocalFailure):
    """A restore broke off among its last copies: the model holds a mixture of two states; do not train it."""


class ControlError(LocalFailure):
    """The local daemon did not answer, or refused."""


class NotAuthorised(HotswarmError):
    """The swarm key or certificate was refused, or is missing where one is needed."""

    exit_code = 12


class PeerUnavailable(HotswarmError):
    """A peer did not answer, or answered that it cannot serve now. Try elsewhere, or later."""

    exit_code = 75

    def __init__(self, message: str, peer: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.peer = peer
        self.retry_after_s = retry_after_s


class PeerMisbehaved(HotswarmError):
    """A peer sent something that no honest peer sends. It is excluded from this fetch."""

    exit_code = 13

    def __init__(self, peer: str, evidence: str) -> None:
        super().__init__(f"peer {peer} misbehaved: {evidence}; it is left out of this fetch")
        self.peer = peer
        self.evidence = evidence


class RecoveryError(HotswarmError):
    """Recovery did not happen, and nothing was changed."""


class NoSnapshot(RecoveryError):
    """Neither this node nor any peer that answered holds a usable snapshot."""

    exit_code = 10


class Incompatible(RecoveryError):
    """The snapshot belongs to another model or optimizer; the message names the first difference."""


class Stale(RecoveryError):
    """Every snapshot found is older than the outer step that this node itself has reached."""

    exit_code = 3


class Unconfirmed(RecoveryError):
    """Fewer nodes than `min_agree` vouch for one outer state."""
