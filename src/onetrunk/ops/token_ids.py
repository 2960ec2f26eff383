"""Rules about lists of token ids that prompts (`data`) and texts of reward models (`models`) share."""

from __future__ import annotations


def without_second_bos(ids: list[int], bos_token_id: int | None) -> list[int]:
    """Return token ids that begin with at most one BOS token.

    A text that already contains the BOS token, because a chat template rendered it for example, gets a second one from
    tokenizers that add their own.
    """
    return ids[1:] if bos_token_id is not None and ids[:2] == [bos_token_id, bos_token_id] else ids
