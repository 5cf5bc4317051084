"""Reads a tokeniser of any kind from what its `to_bytes` gave."""

from __future__ import annotations

from policies.tokens.fast import FastTokenizer
from policies.tokens.residual_vq import ResidualVQ
from policies.tokens.tokenizer import ActionTokenizer
from wire.errors import InvalidDataError


def read_tokenizer(data: bytes) -> ActionTokenizer:
    """What any tokeniser's `to_bytes` gave. Raises `InvalidDataError` for anything else."""
    # a pickle's first bytes may also begin the length of a good header, after which the header follows
    if data[8:9] != b"{" and (data[:4] == b"PK\x03\x04" or data[:1] == b"\x80"):
        raise InvalidDataError(
            "action tokeniser: a pickle or torch archive, which may run code when read and is not opened. Use what "
            "`policy tokenizer fit` or `to_bytes` wrote: JSON or safetensors."
        )
    return FastTokenizer.from_bytes(data) if data[:1] == b"{" else ResidualVQ.from_bytes(data)
