"""Launches of the cases of two_processes.py, and the comparisons of their results with those of one process.

Each launch writes a folder of results once; many tests read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests import places
from tests.ppo.support import assert_same, differ


@dataclass(frozen=True)
class Launch:
    """A launch through accelerate_configs/CONFIG.yaml; `cases` are those that it runs (none: all)."""

    config: str = ""
    processes: int = 2
    cases: tuple[str, ...] = ()


ALONE = Launch(processes=1)


def launches(function: Any) -> Any:
    """Mark a test that starts several processes for minutes."""
    for mark in (pytest.mark.multi_process, pytest.mark.slow, pytest.mark.timeout(3600)):
        function = mark(function)
    return function


@dataclass(eq=False)
class Launches:
    """The launches of a script in this folder, by the names that tests have for them."""

    script: str
    named: Mapping[Any, Launch]

    @cache  # noqa: B019 - as many objects as there are test files
    def folder(self, place: str, how: Any, *words: str) -> Path:
        """Run the cases of a launch, or what `words` say; return the folder of the results, with stderr.txt."""
        launch, folder = self.named[how], Path(mkdtemp())
        script, words = Path(__file__).with_name(self.script), words or launch.cases
        done = places.launch(place, launch.config, launch.processes, script, folder, *words)
        (folder / "stderr.txt").write_text(done.stderr)
        return folder

    def facts(self, place: str, how: Any, name: str, rank: int = 0) -> Any:
        """Return what a process wrote about a case."""
        return json.loads((self.folder(place, how) / f"{name}-{rank}.json").read_text())

    def weights(self, place: str, how: Any, name: str, rank: int = 0, part: str = "") -> dict[str, Tensor]:
        """Return the trained weights of a case."""
        return load_file(self.folder(place, how) / f"{name}-{rank}{part}.safetensors")

    def alone(self) -> Any:
        """Return the name of the launch of one process."""
        return next(how for how, launch in self.named.items() if launch.processes == 1)

    def require_rows_of_one(self, place: str, how: Any, name: str, group: int = 1) -> None:
        """Require the completions of one process, of which the first process of each group has an equal share."""
        alone = self.facts(place, self.alone(), name)["completions"]
        ranks = [self.facts(place, how, name, rank)["completions"] for rank in range(self.named[how].processes)]
        firsts = ranks[::group]
        assert len(alone) == 16 and all(len(own) * len(firsts) == 16 for own in firsts)
        assert not any(own for rank, own in enumerate(ranks) if rank % group)
        rows = 8 // len(firsts)
        for i in (0, 1):
            together = [row for own in firsts for row in own[rows * i : rows * (i + 1)]]
            assert sorted(together) == sorted(alone[8 * i : 8 * i + 8])

    def require_weights_of_one(self, place: str, how: Any, name: str) -> None:
        """Require that training changes the weights, to those of one process and the same on all processes."""
        alone, before = (self.weights(place, self.alone(), name, part=part) for part in ("", "-before"))
        first, *others = (self.weights(place, how, name, rank) for rank in range(self.named[how].processes))
        for other in others:
            assert_same(other, first)
        assert len(differ(alone, before)) > len(alone) / 2
        # Other packs and another order of the sums, over 4 to 8 steps of float32.
        assert_same(first, alone, atol=2e-5, rtol=1e-4)

    def require_log_of_one(self, place: str, how: Any, name: str) -> None:
        """Require the history, the KL coefficient and the moments of the scores of one process."""
        alone, found = (self.facts(place, launch, name) for launch in (self.alone(), how))
        assert len(found["history"]) == len(alone["history"])
        for entry, one in zip(found["history"], alone["history"], strict=True):
            assert entry.keys() == one.keys()
            for key in set(one) - {"mine/rows"}:
                # A token at the edge of the clip range may fall on either side: one of 40.
                tolerance = 0.03 if key.endswith("clip_fraction") else 2e-4
                assert entry[key] == pytest.approx(one[key], rel=2e-3, abs=tolerance), key
        assert found["beta"] == pytest.approx(alone["beta"])
        assert found["moments"] == pytest.approx(alone["moments"], rel=1e-5)

    def require_run_of_one(self, place: str, how: Any, name: str, group: int = 1) -> None:
        """Require completions, weights, log and evaluation of one process, of whose rows each group has a share."""
        self.require_rows_of_one(place, how, name, group)
        self.require_weights_of_one(place, how, name)
        self.require_log_of_one(place, how, name)
        self.require_evaluation_of_one(place, how, name)
        share = 8 * group / self.named[how].processes
        assert self.facts(place, how, name)["mine"] == [share, share]

    def require_exact_resume(self, place: str, how: Any) -> None:
        """Require that a run which was resumed in the middle of a rollout ends with the weights of a whole one."""
        whole = self.weights(place, how, "whole")
        for rank in range(self.named[how].processes):
            assert_same(self.weights(place, how, "resumed", rank), whole, **places.REPEATED[place])

    def require_evaluation_of_one(self, place: str, how: Any, name: str) -> None:
        """Require that every process reports the evaluation of one."""
        # What float rounding makes of 0 (sampling/logprob_gap_*) is absolute.
        expected = pytest.approx(self.facts(place, self.alone(), name)["evaluation"], rel=1e-3, abs=1e-5)
        for rank in range(self.named[how].processes):
            assert self.facts(place, how, name, rank)["evaluation"] == expected
