"""Compaction: a context that grows too long gives way to a shorter one, and the episode continues (2607.05378).

The policy writes a summary, which is a turn as any other: it trains with the reward of the whole episode. The new
context is the prompt with the summary, and the last turns word by word. Or a function of the user says what the new
context is (a sliding window, results of tools left out), and no summary is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from onetrunk.rollouts.episodes.chat_turns import ChatTurns, with_observation
from onetrunk.rollouts.episodes.kinds import CompactionLimits, LiveEpisode, PlayedTurn
from onetrunk.rollouts.episodes.rows import NewContext
from onetrunk.types import Message, as_text

SUMMARY = "\n\nSummary of the conversation so far:\n"


class Compaction:
    """Says when the context of an episode is compacted, and what the new one is.

    Args:
        limits: with a max_context_length.
        turns: renders messages.
        turn_length: most tokens of a turn, also of a summary.
    """

    def __init__(self, limits: CompactionLimits, turns: ChatTurns, turn_length: int):
        self.limits, self.turns, self.turn_length = limits, turns, turn_length

    def request(self, is_chat: bool, stop_ids: Sequence[int], stopped: bool) -> list[int]:
        """Return the ids that ask for a summary after a turn, and where it begins."""
        if not is_chat:
            return self.turns.text_ids(self.limits.compaction_prompt)
        return self.turns.ids_of([self.message], stop_ids, stopped)

    @property
    def message(self) -> Message:
        """What asks for a summary."""
        return {"role": "user", "content": self.limits.compaction_prompt}

    def require_room(self, longest_prompt: int, is_chat: bool) -> None:
        """Raise ValueError if the longest prompt, a summary and the next turn may not fit into a context."""
        request = len(self.request(is_chat, (), stopped=True))
        lacking = longest_prompt - self.prompt_room(is_chat)
        if lacking > 0:
            needed = self.limits.max_context_length + lacking
            raise ValueError(
                f"max_context_length is {self.limits.max_context_length}, and a context may need {needed} tokens: the"
                f" longest prompt ({longest_prompt}), a summary and a turn (max_turn_length {self.turn_length} each),"
                f" and a request ({request}) and its summary; raise it, or lower max_turn_length or the prompt length"
            )

    def prompt_room(self, is_chat: bool) -> int:
        """Return the most tokens of a prompt that leave room for a summary and the next turn in a context."""
        request = len(self.request(is_chat, (), stopped=True))
        summary = self.turn_length * (self.limits.compact is None)
        return self.limits.max_context_length - summary - self._room(0, request)

    def is_due(self, length: int, done: int, request: int) -> bool:
        """Return whether a context has to be compacted before the next turn.

        Args:
            length: its tokens.
            done: compactions of the episode so far.
            request: tokens that ask for a summary, for which there has to be room after that turn.
        """
        return self._may_compact(done) and length + self._room(done, request) > self.limits.max_context_length

    def _may_compact(self, done: int) -> bool:
        return self.limits.max_compactions is None or done < self.limits.max_compactions

    def _room(self, done: int, request: int) -> int:
        asks_later = self.limits.compact is None and self._may_compact(done)
        return self.turn_length + asks_later * (request + self.turn_length)

    def by_rule(self, row: LiveEpisode) -> NewContext:
        """Return the context that the user's function makes of the messages of an episode."""
        prompt = row.prompt if row.is_chat else [{"role": "user", "content": row.prompt}]
        new = self.limits.compact([dict(message) for message in (*prompt, *row.messages)])
        if not isinstance(new, list) or not new or not all(isinstance(m, dict) and "role" in m for m in new):
            raise ValueError(f"compact returned {str(new)[:200]}; return a list of messages, like its argument")
        if not row.is_chat:
            ids = self.turns.text_ids("".join(message["content"] for message in new))
            if not ids:
                raise ValueError("compact returned messages without a token; leave at least the task")
            return NewContext(ids)
        if new[-1]["role"] == "assistant":
            raise ValueError("compact returned messages that end with the assistant's; end with one that it answers")
        return NewContext(self.turns.prompt_ids(self.turns.foreign_messages(new), row.tools))

    def with_summary(self, row: LiveEpisode, summary: str, summary_ids: list[int], request: int) -> NewContext | None:
        """Return the prompt with a summary and as many of the last turns as fit; None if not even that fits.

        The last answer stays also if no turn does.
        """
        most = self.limits.max_context_length - self._room(row.counts.compactions, request)
        for count in range(min(self.limits.kept_turns, len(row.played)), -1, -1):
            ids = self._chat(row, summary, count) if row.is_chat else self._text(row, summary_ids, count)
            if len(ids) <= most:
                return NewContext(ids)
        return None

    def _text(self, row: LiveEpisode, summary_ids: list[int], count: int) -> list[int]:
        kept = row.played[-count:] if count else [PlayedTurn([], [], row.played[-1].answer_ids)]
        return [*row.prompt_ids, *summary_ids, *(i for turn in kept for i in (*turn.token_ids, *turn.answer_ids))]

    def _chat(self, row: LiveEpisode, summary: str, count: int) -> list[int]:
        kept = [message for turn in row.played[len(row.played) - count :] for message in turn.messages]
        answers = "" if count else "\n\n" + as_text(row.played[-1].messages[1:])
        shown = with_observation(row.shown, self.turns.foreign(SUMMARY + summary + answers))
        return self.turns.prompt_ids([*shown, *self.turns.foreign_messages(kept)], row.tools)
