"""Weights from a file into a policy: what is loaded is hashed, and nothing half loaded acts."""

from __future__ import annotations

import hashlib
from pathlib import Path

from policies.interface.policy import Policy
from wire.errors import CorruptDataError, FleetError
from wire.types import PolicyVersion


def load_verified(policy: Policy, version: PolicyVersion, path: Path) -> None:
    """Load `version`, whose weights lie at `path`, into `policy`.

    Raises `OSError` and, for a file that was changed since it arrived, `CorruptDataError`; then nothing was touched.
    Otherwise raises what `Policy.load` does; a policy that is neither the old nor the new version has `version` 0.
    """
    # The very bytes that are hashed are loaded: the file may be another one a moment later.
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != version.sha256:
        raise CorruptDataError(
            f"version {version.number}: {path} is not what arrived; it was changed on this disk. It is fetched again. "
            "If that happens again, look at the disk."
        )
    try:
        policy.load(data, version.number)
    except FleetError:
        raise
    except Exception:
        # Nobody knows what it has written by then.
        policy.version = 0
        raise
