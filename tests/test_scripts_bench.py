"""scripts/bench.py and bench_ops.py from start to end on a tiny shape, and whether what is timed is what is named."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import LogitsProcessorList, Qwen2Config

from onetrunk.plan.costs import operations_of
from onetrunk.rollouts import LocalBackend, SamplingParams
from onetrunk.rollouts.decoding import row_uniforms
from tests.ppo.support import base_model
from tests.processes import ROOT, python
from tests.tiny import tiny_model

# A layer: 8*8*2 (queries, output) + 8*4*2 (keys, values) + 3*8*16 (feed-forward) = 576 weights; the head: 10*8.
SMALL = Qwen2Config(
    vocab_size=10, hidden_size=8, num_hidden_layers=2, intermediate_size=16, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """Make the modules of the scripts importable."""
    for folder in ("scripts", "scripts/bench"):
        monkeypatch.syspath_prepend(ROOT / folder)


def run(script: str, *options: str, cache: Path) -> subprocess.CompletedProcess:
    return python(f"scripts/{script}", *options, code=None, cwd=ROOT, OMP_NUM_THREADS="1", XDG_CACHE_HOME=str(cache))


@pytest.mark.slow
def test_the_benchmark_writes_medians_commands_and_the_machine_without_a_baseline(tmp_path):
    options = ["--quick", "--rounds", "1", "--rows", "mixed-top"]
    done = run("bench.py", *options, "--output_dir", str(tmp_path), cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ours is timed alone" in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    ours = results["rows"]["mixed-top"]["ours"]
    assert set(ours["seconds"]) == {"generate", "score", "update", "total"}
    assert all(seconds > 0 for seconds in ours["seconds"].values())
    assert ours["peak_mb"] > 100
    readme = (tmp_path / "README.md").read_text()
    assert "python scripts/bench/onetrunk_ppo.py --shape tiny" in str(results["commands"])
    assert f"{results['machine']['cores']} cores" in readme
    assert str(ROOT) not in readme + json.dumps(results)


@pytest.mark.slow
def test_the_reward_model_of_the_benchmark_reads_the_tokens_that_were_sampled(tmp_path):
    """Text between the two tokenizers loses the special tokens alone, so ours is not timed on less than TRL."""
    program = """
import sys
sys.path.insert(0, "scripts/bench")
import onetrunk_ppo as bench
from workload import FIRST_WORD
given = bench.parse("--shape tiny --prompt 8 --completion 8 --rollout 4 --iterations 1 --mixed".split())
work = bench.Workload.from_options(given)
marks = bench.Marks(work, bench.Meter())
trainer = bench.build_trainer(work, sys.argv[1], given, marks)
reward, texts = trainer.sampler.rewards.functions[0], []
call = type(reward).__call__
type(reward).__call__ = lambda self, prompts, completions, *a, **k: (
    texts.extend(p + c for p, c in zip(prompts, completions)), call(self, prompts, completions, *a, **k))[1]
trainer.train()
rollout = marks.rollouts[0]
for text, prompt, completion in zip(texts, rollout.prompt_ids, rollout.completion_ids, strict=True):
    words = [i for i in prompt + completion if i >= FIRST_WORD]
    assert reward.tokenizer(text)["input_ids"] == words, (text, words)
assert [len(ids) for ids in rollout.completion_ids] == work.completion_lengths(0)
assert len(texts) == 4
"""
    python("-c", program, tmp_path, cwd=ROOT)


def test_completions_end_where_they_must_if_rows_that_waited_join_those_that_decode(monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")  # The script sets it; it is undone here.
    for name in ("bitsandbytes", "scipy", "triton"):
        monkeypatch.setitem(sys.modules, name, None)  # As the script does, for a process of its own.
    from onetrunk_ppo import ForceLengthOfRunningRows
    from workload import Workload

    work = Workload(completion=6)
    prompts = [[4 + i, *range(10, 11 + i % 3)] for i in range(8)]
    lengths = [6, 1, 3, 6, 2, 5, 4, 1]
    found = {}
    for most in (None, 3, 1):
        processors = LogitsProcessorList([ForceLengthOfRunningRows(work, prompts, lengths)])
        backend = LocalBackend(tiny_model("llama"), max_rows=most, logits_processor=processors)
        params = SamplingParams(work.completion, stop_token_ids=(1,))
        found[most] = backend.generate(prompts, params, [(0, 0, row) for row in range(8)])
        assert [len(ids) for ids in found[most].completion_ids] == lengths
    assert found[None].completion_ids == found[3].completion_ids == found[1].completion_ids


def test_the_benchmark_says_what_is_wrong_before_it_times_anything(tmp_path):
    options = ["--quick", "--output_dir", str(tmp_path / "results"), "--rows", "equal-top", "fastest"]
    done = run("bench.py", *options, cache=tmp_path)
    assert done.returncode == 1
    assert "there is no row fastest; the rows are equal-all" in done.stdout
    assert not (tmp_path / "results").exists()


def test_the_page_of_the_measured_results_is_what_the_script_writes(tmp_path):
    from bench.report import write_readme

    folder = ROOT / "scripts" / "bench" / "results" / "cpu"
    for path in folder.glob("*.json"):
        shutil.copy(path, tmp_path)
    write_readme(tmp_path)
    assert (tmp_path / "README.md").read_text() == (folder / "README.md").read_text()


def test_a_row_is_judged_by_the_medians_of_all_iterations_and_by_its_memory():
    from bench.report import compare
    from bench.rows import ROWS

    def process(totals: list[float], peak_mb: int) -> dict:
        iterations = [{"generate": 1.0, "score": 1.0, "update": t - 2, "total": t} for t in totals]
        return {"iterations": iterations, "peak_mb": peak_mb}

    baseline = [process([70, 72], 4000), process([71, 79], 4200)]  # medians 71.5 s and 4100 MB
    ours = [process([14, 15], 1200), process([16, 17], 1300)]  # 15.5 s and 1250 MB
    row = compare(ROWS["equal-top"], ours, baseline)
    assert row["ratio"]["total"] == 4.61  # 71.5 / 15.5; 3.7 is required, 5 aimed at
    assert row["memory_share"] == 0.305  # 1250 / 4100; at most 0.33
    assert (row["meets_floor"], row["reaches_target"]) == (True, False)
    hungry = compare(ROWS["equal-top"], [process([14, 15], 1400)], baseline)
    assert hungry["meets_floor"] is False


def test_against_agilerl_both_adapt_the_same_layers_and_no_reward_model_runs():
    from bench.processes import AGILERL
    from bench.report import commands
    from bench.rows import choose_rows

    rows = choose_rows(None, is_quick=False, baseline="agilerl")
    assert {"equal-all", "mixed-top"} <= set(rows)
    assert not any("reward" in name for name in rows)
    ours, theirs = commands(rows["mixed-top"], AGILERL)
    assert theirs == "python scripts/bench/agilerl_baseline.py --mixed --adapter_layers top-4"
    assert ours == "python scripts/bench/onetrunk_ppo.py --mixed --adapter_layers top-4 --learn_only"
    assert rows["mixed-top"].floor is None


def test_the_least_seconds_of_a_phase_are_its_flops_and_bytes_over_the_ceilings():
    from roofline import Ceilings, Iteration, least_seconds

    # Two rows of 3 + 1 tokens: nothing is decoded after the prompt, since its pass gives the first token.
    work = Iteration(SMALL, SMALL, 1, epochs=4, prompts=[3, 3], completions=[1, 1], itemsize=4)
    least = least_seconds(work, Ceilings(flops=1.0, bandwidth=1.0))
    # Attention: 4 * context * 8 per token and layer; context is half a row.
    assert least["generate"] == 6 * 2 * (2 * 576 + 4 * 1.5 * 8)
    branch = 8 * (2 * 576 + 4 * 2 * 8) + 2 * 2 * 80
    assert least["score"] == 8 * 2 * (2 * 576 + 4 * 2 * 8) + 2 * branch
    assert least["update"] == 4 * 2 * branch
    # A reward adapter runs the trained layer alone.
    least = least_seconds(replace(work, reward=None), Ceilings(flops=1.0, bandwidth=1.0))
    assert least["score"] == 8 * (2 * 576 + 4 * 2 * 8) + 2 * branch
    assert least["update"] == 4 * 2 * branch


def test_a_decoded_token_reads_all_weights_or_computes_whatever_takes_longer():
    from roofline import Ceilings, decode_seconds

    slow_memory, slow_products = Ceilings(flops=1e9, bandwidth=1.0), Ceilings(flops=1.0, bandwidth=1e9)
    assert decode_seconds(SMALL, 3, 2, slow_memory) == 2 * (2 * 576 + 80)
    # In 4 bit the head keeps 16; in float32 it has 32.
    assert decode_seconds(SMALL, 3, 0.5, slow_memory) == 0.5 * 2 * 576 + 2 * 80
    assert decode_seconds(SMALL, 3, 4, slow_memory) == 4 * (2 * 576 + 80)
    assert decode_seconds(SMALL, 3, 2, slow_products) == 3 * 2 * (2 * 576 + 80)


SLOW = pytest.mark.slow
TOP, CHECKPOINTED = {"adapter_layers": "top-2"}, {"activation_checkpointing": True}


@pytest.mark.parametrize(
    ("family", "dtype", "settings"),
    [
        ("llama", "bfloat16", {}),
        pytest.param("qwen2", "bfloat16", TOP, marks=SLOW),
        pytest.param("llama", "bfloat16", CHECKPOINTED, marks=SLOW),
        pytest.param("llama", "float32", CHECKPOINTED, marks=SLOW),
        pytest.param("qwen2", "float32", {}, marks=SLOW),
        pytest.param("qwen3", "bfloat16", {}, marks=SLOW),
    ],
)
def test_the_operations_of_a_token_and_of_a_pack_are_those_by_which_plan_bounds_the_seconds(family, dtype, settings):
    from launches import launches

    layers, adapted = 6, 2 if "adapter_layers" in settings else 6
    known = operations_of(getattr(torch, dtype).itemsize)
    expected = {
        "decode": known.of_token(layers, adapted),
        # Policy and reference, and the frozen layers once.
        "score": known.of_score(2 * adapted + layers - adapted, adapted),
        "update": known.of_update(adapted, 0, "activation_checkpointing" in settings),
    }
    counted = launches(family, layers, dtype=dtype, **settings)
    for phase, number in expected.items():
        # The two norms more of Qwen3 are left out.
        lowest = 0.75 if family == "qwen3" else 0.95
        assert lowest <= number / counted[phase] <= 1.05, (phase, number, counted[phase])


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(12, stop_token_ids=tuple(range(4, 20))),
        SamplingParams(12, temperature=0.7, top_p=0.8),
        SamplingParams(5, temperature=0.0),
    ],
    ids=["stop tokens", "top_p", "greedy"],
)
def test_a_step_over_buffers_in_place_samples_the_tokens_of_the_sampler(params):
    from decode_graph import StaticStep

    model, prompts = base_model().eval(), [[4, 5, 6], [7], [8, 9, 4, 5, 6]]
    rounds = [[(number, row) for row in range(3)] for number in range(2)]
    with torch.no_grad():
        step = StaticStep(model, (3, 5, params.max_completion_length), params)
        for keys in rounds:
            uniforms = torch.stack([torch.from_numpy(row_uniforms(key, step.completion)) for key in keys])
            expected = LocalBackend(model).generate(prompts, params, keys)
            token_ids = step.generate(prompts, uniforms)
            assert token_ids == expected.completion_ids
            for row, ids in enumerate(token_ids):
                assert_close(step.logprobs[row, : len(ids)], expected.sampler_logprobs[row], atol=5e-5, rtol=0)


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_graph_that_computes_something_else_than_its_step_ends_with_an_error(is_stale, monkeypatch, capsys):
    import decode_graph

    # In the place of a graph, which only a GPU has.
    monkeypatch.setattr(
        decode_graph.StaticStep, "_captured", lambda step: (lambda: step.place.add_(1)) if is_stale else step.step
    )
    replaying = partial(decode_graph.StaticStep, replays=True)
    monkeypatch.setattr(decode_graph, "StaticStep", lambda *args: replaying(*args[:3]))
    with pytest.raises(SystemExit, match="draws other tokens") if is_stale else nullcontext():
        decode_graph.main("--shape tiny --rows 2 --tokens 6".split())
    assert json.loads(capsys.readouterr().out)["replay_equals_step"] is not is_stale


@pytest.mark.multi_process
@pytest.mark.slow
def test_independent_batches_keep_the_stages_of_a_pipeline_busy(tmp_path):
    options = "--stages 2 --stage_ms 60 --rows 2 --layers 2 --prompt 2 --completion 40 --repeats 1".split()
    done = run("bench_pipeline.py", *options, cache=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["same_tokens"] and found["tokens"] == 2 * 2 * 40 and found["bound"] == 2
    assert found["stage_time"] == "emulated, 60 ms per forward, clock of forwards"
    # One after the other: 2 batches of 40 turns through 2 stages of 60 ms. In flight together: the second batch starts
    # one stage later, and each then has a turn every 2 stages: 2 * 40 + 1 stages.
    assert found["seconds"]["naive"] == pytest.approx(2 * 40 * 2 * 0.06)
    assert found["seconds"]["interleaved"] == pytest.approx(81 * 0.06)
    # A batch cut into two parts gains nothing: both of its parts pass a stage for every token.
    assert found["seconds"]["microbatched"] == pytest.approx((2 * 40 * 2 + 1) * 0.06)
    assert found["speedup"]["interleaved"] >= 1.75


@pytest.mark.slow
def test_the_benchmark_of_the_parts_prints_a_ratio_for_each_and_the_memory_of_the_logprobs(tmp_path):
    tiny = "--tokens 8 --hidden 8 --vocab 32 --prompts 2 --completion 4 --repeats 1".split()
    done = run("bench_ops.py", *tiny, cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(part in done.stdout for part in ("logprobs, fused", "GAE, vectorised", "decode loop against generate"))
    # Training and scoring, three shapes of GAE, the decode loop
    assert len(re.findall(r"\d\.\d\dx", done.stdout)) == 2 + 3 + 1
    assert len(re.findall(r"logprobs, (?:forward and backward|scoring), vocabulary 32 ", done.stdout)) == 2
