"""The packs of a rollout: the rows that the model reads, and the episodes that they belong to.

An episode whose context was compacted has several rows, its segments: a context, and the turns that were sampled in
it. So a token trains once, in the context in which it was drawn. `joined` puts the outputs of an episode's segments
end to end. There rewards, values and masks are those of one long row, and GAE runs over it as over any other: the
value after a segment's last token is that before the next sampled token. `cut` takes the experience apart again. A row
that was never compacted is its only segment, and nothing is joined or cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from onetrunk.models.trunk import PackOutput
from onetrunk.ops.losses import ImportanceWeights, importance_weights
from onetrunk.ops.packing import PackLimits, make_pack, plan_packs, split_packs
from onetrunk.rewards.reward import Scores
from onetrunk.types import Experience, Pack, Rollout, to_device


@dataclass(frozen=True)
class RolloutPack:
    """Rows of a rollout that go through the model together, and their results; R rows, C completion tokens.

    Args:
        pack: the rows as the model takes them.
        rows: their numbers in the rollout of this process; of a segment that of its episode, -1 if it is empty work.
        states: [N, H] trunk states captured while sampling, without padding, or None.
        output: the model's outputs, None for the roles that have not run.
        loss_mask, rewards: [R, C] the tokens that train, and KL and score per token; None until the rollout is scored.
        importance: importance weights [R, C] of the tokens, or None.
        starts: where the rows begin in the completions of their episodes; None: they are whole completions.
    """

    pack: Pack
    rows: list[int]
    states: Tensor | None = None
    output: PackOutput = PackOutput()
    loss_mask: Tensor | None = None
    rewards: Tensor | None = None
    importance: ImportanceWeights | None = None
    starts: list[int] | None = None

    def sampler_logprobs(self, rollout: Rollout) -> Tensor:
        """Return the sampler's logprobs [R, C] of the pack's rows in float64, on its device, 0 at padding."""
        rows = [rollout.sampler_logprobs[row].double().cpu() for row in self.rows]
        return pad_sequence(rows, batch_first=True).to(self.pack.input_ids.device, non_blocking=True)

    def dense_rewards(self, scores: Scores, scale: float) -> Tensor | None:
        """Return what arrives at each token [R, C], divided by `scale`, on its device; None: nothing inside."""
        if scores.by_token is None:
            return None
        rows = [scores.by_token[row] / scale for row in self.rows]
        return pad_sequence(rows, batch_first=True).to(self.pack.input_ids.device, non_blocking=True)


def with_importance(item: RolloutPack, rollout: Rollout, **bounds: Any) -> RolloutPack:
    """Return a pack that the policy has scored with the importance weights of its tokens (`importance_weights`)."""
    sampled, mask = item.sampler_logprobs(rollout).float(), item.pack.completion_mask
    return replace(item, importance=importance_weights(item.output.logprobs, sampled, mask, **bounds))


def rollout_packs(
    rollout: Rollout,
    minibatches: Sequence[Sequence[int]],
    limits: PackLimits,
    pad_id: int,
    device: torch.device,
    agree: Callable[[list[int]], list[int]] | None = None,
) -> list[RolloutPack]:
    """Return the packs of a rollout on `device`, with the trunk states that the sampler captured.

    Args:
        minibatches: the rows of each minibatch; a pack holds rows of one minibatch only.
        limits: the most rows and tokens that a pack may have.
        agree: maps the number of packs of each minibatch to the number that it must have (`equal_counts`).
    """
    rollout, minibatches, owners, starts = _segments(rollout, minibatches, agree)
    prompts, completions, states = rollout.prompt_ids, rollout.completion_ids, rollout.states
    lengths = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    plans = [plan_packs([lengths[i] for i in members], limits) for members in minibatches]
    if agree is not None:
        counts = agree([len(plan) for plan in plans])
        plans = [split_packs(plan, count) for plan, count in zip(plans, counts, strict=True)]
    packs = []
    for number, (members, plan) in enumerate(zip(minibatches, plans, strict=True)):
        for places in plan:
            rows = [members[place] for place in places]
            turns = None if rollout.turn_ids is None else [rollout.turn_ids[i] for i in rows]
            pack = make_pack([prompts[i] for i in rows], [completions[i] for i in rows], pad_id, number, turns)
            captured, width = None, pack.input_ids.shape[1]
            if states is not None:
                own, real = (x.to(states.device, non_blocking=True) for x in (torch.tensor(rows), pack.places.real))
                captured = states.index_select(0, own)[:, :width].flatten(0, 1).index_select(0, real)
            pack = to_device(pack, device)
            own_starts = None if starts is None else [starts[i] for i in rows]
            packs.append(RolloutPack(pack, [owners[i] for i in rows], captured, starts=own_starts))
    return packs


def _segments(
    rollout: Rollout, minibatches: Sequence[Sequence[int]], agree: Callable[[list[int]], list[int]] | None
) -> tuple[Rollout, Sequence[Sequence[int]], Sequence[int], list[int] | None]:
    """Return the segments of a rollout as a rollout, those of each minibatch, their episodes, and where they begin.

    Processes whose packs must be equally many get equally many segments: copies of the shortest one are empty work.
    """
    if rollout.restarts is None:
        return rollout, minibatches, range(len(rollout)), None
    owners, starts, prompts, completions, turns = [], [], [], [], []

    def add(owner: int, start: int, prompt: list[int], completion: list[int], turn_ids: list[int]) -> None:
        columns = (owners, owner), (starts, start), (prompts, prompt), (completions, completion), (turns, turn_ids)
        for column, entry in columns:
            column.append(entry)

    for row, (ids, turn_ids) in enumerate(zip(rollout.completion_ids, rollout.turn_ids, strict=True)):
        contexts = [range(0), *rollout.contexts(row)]
        ends = [*(context.start for context in contexts[1:]), len(ids)]
        for given, end in zip(contexts, ends, strict=True):
            prompt = ids[given.start : given.stop] if given else rollout.prompt_ids[row]
            add(row, given.stop, prompt, ids[given.stop : end], turn_ids[given.stop : end])
    as_sets = map(set, minibatches)
    of_minibatches = [[i for i, owner in enumerate(owners) if owner in members] for members in as_sets]
    for segments, most in zip(of_minibatches, agree([*map(len, of_minibatches)]) if agree else (), strict=False):
        shortest = min(segments, key=lambda i: len(prompts[i]) + len(completions[i]))
        for _ in range(most - len(segments)):
            segments.append(len(owners))
            add(-1, 0, prompts[shortest], completions[shortest], turns[shortest])
    return Rollout(prompts, completions, (), (), turn_ids=turns), of_minibatches, owners, starts


def joined(packs: Sequence[RolloutPack], rollout: Rollout) -> list[RolloutPack]:
    """Return one pack per minibatch with whole episodes and their outputs; the packs as they are without segments.

    The tokens of new contexts have outputs of 0, like those of observations, and no mask counts them. These packs do
    not go through the model.
    """
    if rollout.restarts is None:
        return list(packs)
    numbers = sorted({item.pack.minibatch for item in packs})
    return [_joined([item for item in packs if item.pack.minibatch == number], rollout) for number in numbers]


def _joined(packs: Sequence[RolloutPack], rollout: Rollout) -> RolloutPack:
    rows = _episodes(packs)
    columns = (rollout.prompt_ids, rollout.completion_ids, rollout.turn_ids)
    prompts, completions, turns = ([column[row] for row in rows] for column in columns)
    pack = make_pack(prompts, completions, 0, packs[0].pack.minibatch, turns)
    pack = to_device(pack, packs[0].pack.input_ids.device)
    places = [_places(item, rows, pack.completion_ids.shape[1]) for item in packs]

    def whole(name: str) -> Tensor | None:
        parts = [getattr(item.output, name) for item in packs]
        if parts[0] is None:
            return None
        flat = parts[0].new_zeros(pack.completion_ids.numel() + 1)
        for part, place in zip(parts, places, strict=True):
            flat[place.flatten()] = part.flatten()
        return flat[:-1].view_as(pack.completion_ids)

    output = PackOutput(**{name: whole(name) for name in ("logprobs", "values", "ref_logprobs")})
    if packs[0].output.next_values is not None:  # The value after an episode is that after its last segment.
        ends = {
            (row, start): x
            for item in packs
            for row, start, x in zip(item.rows, item.starts, item.output.next_values, strict=True)
        }
        last = {row: value for (row, _), value in sorted(ends.items(), key=lambda entry: entry[0])}
        output = output._replace(next_values=torch.stack([last[row] for row in rows]))
    if packs[0].output.value_states is not None:
        sampled = [place[item.pack.completion_mask].cpu() for item, place in zip(packs, places, strict=True)]
        order = torch.cat(sampled).argsort()[: int(pack.completion_mask.sum())]  # Empty work comes last.
        states = torch.cat([item.output.value_states for item in packs])
        output = output._replace(value_states=states[order.to(states.device)])
    return RolloutPack(pack, rows, output=output)


def cut(experiences: Sequence[Experience], packs: Sequence[RolloutPack]) -> list[Experience]:
    """Return the experience of each pack, from that of the `joined` ones; as it is if nothing was joined."""
    if packs[0].starts is None:
        return list(experiences)
    of_minibatches = {experience.pack.minibatch: experience for experience in experiences}
    episodes = {n: _episodes([item for item in packs if item.pack.minibatch == n]) for n in of_minibatches}
    return [_cut(of_minibatches[n], item, episodes[n]) for item in packs for n in [item.pack.minibatch]]


def _cut(experience: Experience, item: RolloutPack, rows: Sequence[int]) -> Experience:
    place = _places(item, rows, experience.pack.completion_ids.shape[1])

    def own(whole: Tensor) -> Tensor:
        return torch.cat([whole.flatten(), whole.new_zeros(1)])[place]

    columns = {f.name: getattr(experience, f.name) for f in fields(experience) if f.name not in ("pack", "states")}
    parts = {name: None if whole is None else own(whole) for name, whole in columns.items()}
    return Experience(pack=item.pack, states=item.output.states, **parts)


def _episodes(packs: Sequence[RolloutPack]) -> list[int]:
    """Return the episodes whose segments are in these packs."""
    return sorted({row for item in packs for row in item.rows if row >= 0})


def _places(item: RolloutPack, rows: Sequence[int], width: int) -> Tensor:
    """Return where the tokens [R, C] of a pack are in flat completions [n * width] of episodes; n * width: nowhere.

    Args:
        rows: the n episodes.
    """
    device, nowhere = item.pack.completion_ids.device, len(rows) * width
    first = torch.tensor([rows.index(row) * width if row >= 0 else -1 for row in item.rows])
    first = (first + torch.tensor(item.starts)).to(device)[:, None]
    places = first + torch.arange(item.pack.completion_ids.shape[1], device=device)
    return places.masked_fill(~item.pack.completion_mask | (first < 0), nowhere)
