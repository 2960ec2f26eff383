"""`onetrunk plan` as a command: tables, JSON, files, early mistakes, and the check of a real run."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from onetrunk import cli
from onetrunk.plan.hardware import load_catalog
from onetrunk.plan.timing import COLOCATED, PIPELINED, SERVER
from onetrunk.stages.plan import plan_of_run
from onetrunk.stages.ppo import parse_ppo
from tests.plan.support import device, job
from tests.processes import python
from tests.report.made_runs import write_lines
from tests.stages.recipes import ROOT

pytestmark = pytest.mark.usefixtures("at_the_root")
MODEL = ["--model", "Qwen/Qwen2.5-7B"]
STAGED = ["--rollout_backend", "pipelined", "--pipeline_training", "true"]
ON_SERVERS = [*MODEL, "--use_vllm", "true", "--vllm_server_base_url", "http://a:1"]
IN_STAGES = ["--hardware", "4xH100", *MODEL, *STAGED]
TINY = {
    "model_type": "llama", "vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "torch_dtype": "float32", "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def growing_segments(monkeypatch):
    """Set what makes the margin of rows of changing length small."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")


@pytest.fixture
def small(tmp_path):
    """Return a folder with nothing but a config.json."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


def plan(*words: str) -> int:
    return cli.main(["plan", *map(str, words)])


def adapter_on(base, **content):
    """Return a folder next to `base` with nothing but the config of an adapter on it."""
    adapter = base.parent / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base), **content}))
    return adapter


def launched_settings(folder):
    """Return the settings of PPO, and those of the model, that the launch line in a folder gives to the trainer."""
    (line,) = [line for line in (folder / "launch.sh").read_text().splitlines() if line.startswith("exec ")]
    words = shlex.split(line)
    parts = parse_ppo(words[words.index("--config") :])
    return tuple(next(part for part in parts if hasattr(part, name)) for name in ("schedule", "load_in_4bit"))


def test_a_plan_of_a_recipe_names_memory_time_and_cost(capsys):
    words = ["--config", "llama-3.1-8b/ppo", "--model", "meta-llama/Llama-3.1-8B", "--hardware", "8xH100-80GB"]
    assert plan(*words, "--label_prompts", 1000, "--reward_pairs", 5000, "--distill_rows", 5000) == 0
    out = capsys.readouterr().out
    for part in ("best plan (time)", "bound by", "kv_cache", "usable", "spot $", "label:", "distillation:", "idle:"):
        assert part in out, part


def test_launches_are_named_where_they_decide(capsys):
    words = ("--model", "Qwen/Qwen2.5-0.5B", "--hardware", "1xH100", "--rollout_batch_size", 16, "--engines")
    # 24 layers with adapters: 1,537 operations a token, 5 microseconds each; 128 tokens on average, at most 256.
    least = 24 * (43 + 18) + 73
    assert plan(*words, "local", "--length_spread", 0) == 0
    text = "generate: decoding of 16 rows at once is bound by launches, which take"
    assert f"{text} {128 * least * 5e-6:.2f} s at least: use_vllm" in capsys.readouterr().out
    assert plan(*words, "colocate") == 0
    assert "generate: decoding" not in capsys.readouterr().out


def test_json_has_the_same_numbers_and_they_add_up(capsys):
    assert plan(*MODEL, "--hardware", "2xH100", "--schedules", "sync", "--engines", "local", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    best = content["best"]
    assert best["iteration_s"] == pytest.approx(sum(best["phases_s"].values()), rel=0.05)
    for phase, parts in best["memory_parts_gib"].items():
        assert sum(parts.values()) == pytest.approx(best["memory_gib"][phase])
    cost = content["cost"]
    hours = sum(cost["device_hours"].values())
    assert cost["devices_usd"]["on_demand"] == pytest.approx(hours * load_catalog().devices["H100-80GB"].usd_per_hour)
    assert content["ranking"][0]["why"] == ""


def test_a_budget_chooses_a_plan_that_it_allows(capsys):
    def total(*words):
        assert plan(*MODEL, "--hardware", "8xH100", "--json", *words) == 0
        return json.loads(capsys.readouterr().out)["cost"]["total_usd"]

    fastest, cheapest = total(), total("--objective", "cost")
    assert cheapest < fastest
    middle = (cheapest + fastest) / 2
    assert cheapest <= total("--budget", middle) <= middle


def test_settings_of_ppo_and_means_change_the_plan(capsys):
    def seconds(*words):
        assert plan(*MODEL, "--hardware", "1xH100", "--engines", "local", "--json", *words) == 0
        return json.loads(capsys.readouterr().out)["best"]["phases_s"]

    usual = seconds()
    assert seconds("--num_ppo_epochs", "1")["update"] == pytest.approx(usual["update"] / 4, rel=0.01)
    # Of TRL's names too.
    assert seconds("--num_iterations", "1")["update"] == pytest.approx(usual["update"] / 4, rel=0.01)
    assert seconds("--adapter_layers", "top-7")["update"] < 0.5 * usual["update"]
    assert seconds("--completion_tokens", "64")["generate"] < usual["generate"]


def test_both_ways_to_ask_for_a_float32_base_give_one_plan(capsys):
    def best(*words):
        assert plan(*MODEL, "--hardware", "1xH100", "--engines", "local", "--json", *words, "float32") == 0
        return json.loads(capsys.readouterr().out)["best"]

    assert best("--dtype") == best("--dtypes")


def test_settings_of_ppo_are_in_the_launch_files(tmp_path):
    words = ["--config", "llama-3.1-8b/ppo", "--model", "meta-llama/Llama-3.1-8B", "--hardware", "16xH100-80GB"]
    words += ["--rollout_batch_size", "60", "--load_in_4bit", "true", "--num_rollouts", "10", "--engines", "local"]
    assert plan(*words, "--dry_run", "--write", tmp_path) == 0
    ppo, model = launched_settings(tmp_path)
    assert (ppo.rollout_batch_size, ppo.num_rollouts, model.load_in_4bit) == (60, 10, True)
    assert "dry_run" not in (tmp_path / "launch.sh").read_text()


@pytest.mark.parametrize("words", [["--vllm_server_base_url", "http://a:1"], ["--vllm_request_timeout", "9"]])
def test_a_recipe_that_names_servers_is_planned_with_servers(words, tmp_path):
    words = [*MODEL, "--hardware", "2xH100", "--config", "qwen2.5-0.5b/ppo", "--use_vllm", "true", *words]
    assert plan(*words, "--schedules", "sync", "--write", tmp_path) == 0
    ppo, _ = launched_settings(tmp_path)
    assert ppo.use_vllm and ppo.vllm_server_base_url == ["http://localhost:8100"]


def test_devices_that_are_left_over_are_named(capsys):
    # 64 prompts have no divisor with which trainers and servers are nine.
    assert plan(*MODEL, "--hardware", "9xH100", "--rollout_batch_size", 64) == 0
    assert "1 of 9 devices are unused" in capsys.readouterr().out


def test_rows_of_changing_length_leave_a_larger_margin(capsys, monkeypatch):
    def usable(*words):
        assert plan(*MODEL, "--hardware", "1xH100", "--engines", "local", *words) == 0
        out = capsys.readouterr().out
        return float(re.search(r"usable +([0-9.]+)", out)[1]), "PYTORCH_ALLOC_CONF" in out

    assert usable() == (pytest.approx(0.8 * 79.2, abs=0.01), True)
    assert usable("--length_spread", "0") == (pytest.approx(0.92 * 79.2, abs=0.01), False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert usable() == (pytest.approx(0.92 * 79.2, abs=0.01), False)


def test_a_name_of_models_yaml_a_config_and_a_folder_give_a_shape(small, capsys):
    assert plan("--model", small, "--hardware", "CPU", "--json") == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    assert weights == 400 * 64 + 2 * (64 * 64 * 4 + 3 * 64 * 128)
    for model in (small / "config.json", adapter_on(small)):
        assert plan("--model", model, "--hardware", "CPU", "--json") == 0
        assert json.loads(capsys.readouterr().out)["weights"] == weights


def test_a_continued_adapter_brings_its_rank_and_its_layers(small, tmp_path, capsys):
    words = ["--hardware", "2xH100", "--engines", "server", "--write", tmp_path / "plan"]
    assert plan("--model", adapter_on(small, r=64, layers_to_transform=[1]), *words) == 0
    assert "LoRA rank 64 on the last 1 of 2 layers" in capsys.readouterr().out
    assert "--max_lora_rank 64 " in (tmp_path / "plan" / "servers.sh").read_text()
    assert plan("--model", small, *words) == 0
    assert "LoRA rank 16 on all layers" in capsys.readouterr().out


def test_a_reward_adapter_on_the_base_is_a_branch_of_the_trunk(small, capsys):
    def planned(*words):
        assert plan("--model", small, "--hardware", "2xH100", "--engines", "local", "--json", *words) == 0
        content = json.loads(capsys.readouterr().out)
        return content["best"]["memory_parts_gib"]["update"], content["assumed"], content["best"]["devices"]

    reward = adapter_on(small)
    (alone, *rest), (branch, *same) = planned(), planned("--reward_funcs", reward)
    assert rest == same and "reward" not in branch and branch["adapters"] == pytest.approx(2 * alone["adapters"])
    # On another base the trainer rejects it; here it counts as a model of its own.
    assert "reward" in planned("--reward_funcs", reward, "--model", "Qwen/Qwen2.5-0.5B")[0]


def test_episodes_are_planned_without_tensor_parallelism_and_pipelines(capsys):
    words = ["--model", "Qwen/Qwen2.5-7B", "--hardware", "4xH100", "--engines", "local", "pipelined", "--json"]
    ranking = {}
    for config in ("qwen2.5-1.5b-tools/ppo", "llama-3.1-8b/ppo"):
        assert plan("--config", config, *words) == 0
        ranking[config] = [entry["training"] for entry in json.loads(capsys.readouterr().out)["ranking"]]
    episodes, turns = ranking.values()
    for kind in ("per matrix", "stages"):
        assert any(kind in entry for entry in turns) and not any(kind in entry for entry in episodes)
    assert plan("--config", "qwen2.5-1.5b-tools/ppo", *words[:4]) == 0
    assert "stages is not tried: processes that sample the same rows together" in capsys.readouterr().out


def test_prompts_are_assumed_to_leave_room_in_a_context(capsys):
    words = ["--config", "remember/ppo", "--model", "HuggingFaceTB/SmolLM2-135M", "--hardware", "1xT4"]
    assert plan(*words) == 0
    out = capsys.readouterr().out
    # Half of max_context_length, which is 208.
    assert "prompts of at most 104 tokens (the recipe has no max_prompt_length)" in out
    assert "of at most 208 tokens (max_context_length)" in out


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (["--hardware", "8xV100", *MODEL], 1, ["unknown GPU 'V100'", "did you mean", "--hardware_file"]),
        (["--hardware", "8xA100", *MODEL], 1, ["A100-40GB or A100-80GB"]),
        (["--hardware", "H100", "--model", "Qwen/Qwen2.5-8B"], 1, ["no config.json", "Qwen/Qwen2.5-"]),
        (["--hardware", "H100", "--model", "./absent"], 1, ["no config.json", "./absent"]),
        (["--hardware", "T4", "--model", "Qwen/Qwen2.5-7B", "--dtype", "bfloat16"], 1,
         ["nothing fits 1xT4-16GB", "of which weights", "mallest hardware on which it fits is 1x", "--dtypes nf4"]),
        (["--hardware", "H100", *MODEL, "--budget", "0.01"], 1, ["the budget is $0.01", "--market spot"]),
        (["--hardware", "H100", *MODEL, "--completion_tokens", "9999"], 1, ["max_completion_length 256"]),
        (["--hardware", "H100", *MODEL, "--adapter_layers", "top-99"], 1, ["28 layers", "top-7"]),
        (["--hardware", "H100", *MODEL, "--num_ppo_epochs", "0"], 2, ["num_ppo_epochs is 0"]),
        (["--hardware", "H100", *MODEL, "--rollout_bach_size", "9"], 2, ["rollout_batch_size"]),
        (["--hardware", "H100"], 2, ["--config nor --model"]),
        (MODEL, 2, ["--hardware is missing"]),
        (["--hardware", "H100", *MODEL, "--rollout_backend", "pipelined"], 2, ["two or more devices"]),
        (["--hardware", "H100", *MODEL, "--nodes", "0"], 2, ["--nodes: 0 is not above 0"]),
        (["--hardware", "H100", *MODEL, "--nodes", "1.5"], 2, ["--nodes is 1.5; give a whole number"]),
        (["--hardware", "H100", *MODEL, "--top", "2.5"], 2, ["--top is 2.5"]),
        ([*ON_SERVERS, "--hardware", "2xH100", "--engines", "local"], 2, ["vllm_server_base_url", "--engines server"]),
        ([*ON_SERVERS, "--hardware", "H100"], 2, ["vllm_server_base_url", "two or more devices"]),
        (["--check", "recipes", "--hardware", "CPU", "--json", "--top", "3", "--beta", "0"], 2,
         ["next to --check these have no effect", "--top --json --beta 0"]),
        (["--hardware", "H100", *MODEL, "--label_prompts", "9" * 400], 2, ["--label_prompts: 999"]),
        (["--hardware", "H100", *MODEL, "--objective", "speed"], 2, ["--objective"]),
        (["--check", "recipes", "--hardware", "CPU"], 1, ["recipes holds no run", "output_dir"]),
        (["--calibrate", "a", "--check", "b"], 2, ["--check: not allowed with argument --calibrate"]),
        (["--calibrate", "recipes"], 1, ["is a folder"]),
        ([*IN_STAGES, "--pipeline_split", "10", "19"], 2, ["pipeline_split has 29 layers and the model 28"]),
        ([*IN_STAGES, "--dtypes", "nf4"], 1, ["training in pipeline stages is not tried: a quantised base"]),
        ([*IN_STAGES, "--schedules", "one_step"], 1, ["nothing fits"]),
        ([*IN_STAGES, "--rollout_backend", "local", "--use_vllm", "true"], 2,
         ["on rows of a server, which plan does not know"]),
    ],
)  # fmt: skip
def test_a_mistake_is_one_clear_message(words, code, parts, capsys):
    assert plan(*words) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "Traceback" not in error
    for part in parts:
        assert part in error, error


def test_a_config_without_a_size_is_one_clear_message(small, capsys):
    (small / "config.json").write_text(json.dumps({**TINY, "num_hidden_layers": "many"}))
    assert plan("--model", small, "--hardware", "2xH100") == 1
    assert "has no num_hidden_layers above 0" in capsys.readouterr().err


def test_a_hardware_file_adds_devices_and_changes_prices(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("devices:\n  H100-80GB: {usd_per_hour: 7.5}\n  MINE: {memory_gib: 60, tflops: 500, bandwidth_gb_s:"
                    " 2000, link_gb_s: 100, network_gb_s: 10, host_gib: 100, usd_per_hour: 1}\n")  # fmt: skip
    assert load_catalog(str(path)).devices["H100-80GB"].price("on_demand") == 7.5
    assert load_catalog(str(path)).devices["H100-80GB"].price("spot") == 3.75
    assert plan(*MODEL, "--hardware", "2xMINE", "--hardware_file", path) == 0
    assert "MINE" in capsys.readouterr().out
    for text, part in (
        ("devices: {A: {memory_gib: 1}}", "lacks tflops"),
        ("devices: {H100-80GB: {memory: 1}}", "did you mean memory_gib?"),
        ("devices: {H100-80GB: {tflops: -1}}", "give a number above 0"),
        ("device: {}", "must have the keys"),
        ("devices: {H100-80GB: {rates: {matmul: 0}}}", "rates: matmul is 0"),
    ):
        path.write_text(text)
        load_catalog.cache_clear()
        assert plan(*MODEL, "--hardware", "H100", "--hardware_file", path) == 1
        assert part in capsys.readouterr().err
    load_catalog.cache_clear()


@pytest.mark.usefixtures("growing_segments")
def test_a_plan_shows_and_writes_training_stages(tmp_path, capsys):
    # Two cards in each of four machines: nothing else holds the 66 GB of weights.
    words = ["--model", "Qwen/Qwen2.5-32B", "--hardware", "2xRTX4090", "--nodes", "4"]
    assert plan(*words, "--write", tmp_path / "plan") == 0
    out = capsys.readouterr().out
    for part in (
        "2 x 4 stages, forwards of", "2 x 4 stages of a pipeline", "stages of 16 + 16 + 17 + 15 layers, which sample,"
        " score and update", "buffers", "pipelined pp4", "8 shards (RTX4090-24GB): generate needs",
    ):  # fmt: skip
        assert part in out, part
    names = {path.name for path in (tmp_path / "plan").iterdir()}
    assert {"launch.sh", "accelerate.yaml", "job.sbatch", "skypilot.yaml", "trainjob.yaml", "plan.json"} <= names
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["model"] == "Qwen/Qwen2.5-32B"
    script = (tmp_path / "plan" / "launch.sh").read_text()
    assert "--rollout_backend pipelined --pipeline_stages 4 --pipeline_split 16 16 17 15" in script
    assert "--pipeline_training true" in script and "--activation_offloading false --schedule sync" in script
    config = yaml.safe_load((tmp_path / "plan" / "accelerate.yaml").read_text())
    assert (config["distributed_type"], config["num_processes"], config["num_machines"]) == ("MULTI_GPU", 8, 4)


@pytest.mark.usefixtures("growing_segments")
def test_the_table_of_the_readme_is_what_plans_say(capsys):
    text = (ROOT / "scripts/plan/README.md").read_text()
    rows = [line.strip("|").split("|") for line in text.split("**When training stages win.**")[1].splitlines()
            if line.startswith(("| Qwen2.5-", "| Llama-"))]  # fmt: skip
    hardware = ["2xRTX4090", "2xA6000", "1xH100", "3xH100", "8xA6000", "4xRTX4090"]
    for (model, devices, staged, without), pool in zip(rows, hardware, strict=True):
        owner = "Qwen" if "Qwen" in model else "meta-llama"
        nodes = devices.split()[0] if "machines" in devices else "1"
        assert plan("--model", f"{owner}/{model.strip()}", "--hardware", pool, "--nodes", nodes, "--json") == 0
        ranking = json.loads(capsys.readouterr().out)["ranking"]
        seconds = {kind: [entry["iteration_s"] for entry in ranking if kind in entry["training"]]
                   for kind in ("stages", "per matrix", "shards")}  # fmt: skip
        assert f"{min(seconds['stages']):.0f} s" in staged, model
        for name, kind in (("tensor parallelism", "per matrix"), ("FSDP2", "shards")):
            (said,) = re.findall(rf"{name}[a-z0-9 ]*: ([0-9,]+) s", without) or [None]
            assert said == (f"{min(seconds[kind]):,.0f}" if seconds[kind] else None), (model, name)


def test_the_answer_imports_neither_torch_nor_transformers():
    code = "import sys; from onetrunk import cli; code = cli.main(['plan', *sys.argv[1:]]); print(code, sorted("
    code += "{'torch', 'transformers', 'trl', 'matplotlib'} & set(sys.modules)))"
    assert python("-c", code, *MODEL, "--hardware", "8xH100").stdout.splitlines()[-1] == "0 []"


@pytest.fixture
def run_dir(small, tmp_path):
    """Return the folder of a run of 3 rollouts, with record and log as onetrunk ppo writes them."""
    log = [{"event": "begin", "num_processes": 1, "num_gpus": 0}]
    for step in range(1, 7):
        rollout = {"time/generate_s": 1.0, "time/score_s": 0.5, "completion/length": 24} if step % 2 else {}
        log.append({"step": step, "time/update_s": 0.2, "memory/peak_gib": 1.0, **rollout})
    write_lines(tmp_path / "run" / "_report" / "log.jsonl", log)
    settings = {"rollout_batch_size": 16, "num_ppo_epochs": 2, "max_completion_length": 48, "max_prompt_length": 40,
                "model_name_or_path": str(small), "reward_funcs": ["runs/rm"], "lora_r": 8}  # fmt: skip
    about = {"verb": "ppo", "steps_per_rollout": 2, "settings": settings}
    (tmp_path / "run" / "_report" / "run.json").write_text(json.dumps(about))
    return tmp_path / "run"


def test_a_run_whose_log_has_no_peak_is_compared_without_it(run_dir, capsys):
    log = run_dir / "_report/log.jsonl"
    log.write_text(log.read_text().replace('"memory/peak_gib": 1.0', '"memory/peak_gib": 0.0'))
    assert plan("--check", run_dir, "--hardware", "CPU", "--prompt_tokens", 20) == 0
    out = capsys.readouterr().out
    assert "update" in out and "peak memory" not in out


def test_a_run_is_compared_per_rollout_with_the_plan_of_its_own_settings(run_dir, capsys):
    assert plan("--check", run_dir, "--hardware", "CPU", "--prompt_tokens", 20) == 0
    out = capsys.readouterr().out
    # Two steps of 0.2 s in each rollout.
    assert re.findall(r"^(\w[\w ]*?) +[\d.]+ \w+ +([\d.]+ \w+) +[+-]\d+%", out, flags=re.MULTILINE) == [
        ("generate", "1.000 s"), ("score", "0.500 s"), ("update", "0.400 s"), ("peak memory", "1.000 GiB")
    ]  # fmt: skip
    for part in ("3 rollouts of 16 rows on 1 x CPU", "assumed: the reward takes no memory", "not calibrated"):
        assert part in out


def test_a_run_that_trained_in_stages_is_planned_so():
    values = {"rollout_backend": PIPELINED, "pipeline_split": None, "pipeline_stages": 2, "pipeline_training": True}
    own = plan_of_run(job(), device(), 4, values)
    # Two pipelines of two stages: each has half of the rows.
    assert (own.train.data, own.train.stages, own.train.count) == (2, 2, 4)
    assert (own.sample.replicas, own.sample.stages, own.sample.count) == (2, 2, 4)


def test_a_run_that_sampled_by_vllm_is_planned_with_its_engines():
    values = {"rollout_backend": "local", "vllm_mode": "server", "vllm_server_base_url": None}
    served = job(uses_server=True)
    for urls, replicas in ((None, 1), (["http://a:1", "http://b:1"], 2)):
        sample = plan_of_run(served, device(), 4, {**values, "vllm_server_base_url": urls}).sample
        assert (sample.engine, sample.replicas) == (SERVER, replicas)
    sample = plan_of_run(served, device(), 1, {**values, "vllm_mode": "colocate"}).sample
    assert (sample.engine, sample.replicas) == (COLOCATED, 1)


@pytest.mark.parametrize(
    ("change", "message"), [({"verb": "sft"}, "no record of a PPO run"), ({"steps_per_rollout": 6}, "than 2 rollouts")]
)
def test_a_run_that_cannot_be_compared_says_why(run_dir, change, message, capsys):
    path = run_dir / "_report" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert plan("--check", run_dir, "--hardware", "CPU") == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.multi_process
def test_the_files_of_a_cpu_plan_really_train(workplace):
    """Plan the tiny recipe for CPU processes, run the launch script, and check the run against the plan."""
    python("recipes/tiny/make_data.py")
    model = ["--model", "runs/tiny/base", "--config", "recipes/tiny/ppo.yaml"]
    short = ["--num_rollouts", "2", "--rollout_batch_size", "16", "--num_ppo_epochs", "1"]
    folder, output = workplace / "plan", workplace / "run"
    where = ["--hardware", "2xCPU", *STAGED]
    python("-m", "onetrunk", "plan", *model, *short, *where, "--write", folder)
    script = (folder / "launch.sh").read_text().replace("exec onetrunk", f"exec {sys.executable} -m onetrunk")
    script = script.replace("exec accelerate launch", f"exec {sys.executable} -m accelerate.commands.launch")
    assert "--pipeline_stages 2" in script and "--pipeline_training true" in script
    script = script.replace(" --resume auto", f" --output_dir {output} --eval_strategy no"
                            " --reward_funcs recipes/tiny/rewards.py:polite --resume auto")  # fmt: skip
    (folder / "launch.sh").write_text(script)
    done = subprocess.run(["bash", str(folder / "launch.sh")], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (output / "adapter_model.safetensors").is_file()
    check = ["--check", str(output), "--hardware", "CPU", "--prompt_tokens", "20"]
    told = python("-m", "onetrunk", "plan", *check).stdout
    assert "generate" in told and "peak memory" in told
