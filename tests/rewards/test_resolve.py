"""Tests of `onetrunk.rewards.resolve`: a reward function is found by its path."""

import sys

import pytest

from onetrunk.rewards.resolve import names_a_model, resolve_reward


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "reward_package_of_a_user"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "good.py").write_text(
        "def one(completions, **kwargs):\n    return [1.0 for _ in completions]\nNUMBER = 3\n"
    )
    (folder / "broken.py").write_text("import a_package_that_is_not_there\n")
    (folder / "raising.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


def test_a_callable_passes_through_and_paths_are_imported(package):
    assert resolve_reward(length) is length
    assert resolve_reward("reward_package_of_a_user.good.one")(completions=["a", "b"]) == [1.0, 1.0]
    by_file = resolve_reward(f"{package / 'good.py'}:one")
    assert by_file(completions=["a"]) == [1.0]
    assert resolve_reward(f"{package / 'good.py'}:one") is by_file


@pytest.mark.parametrize(
    ("spec", "error", "reason"),
    [
        ("no_such_package.one", ValueError, "there is no module 'no_such_package'"),
        ("reward_package_of_a_user.nowhere.one", ValueError, "there is no module 'reward_package_of_a_user.nowhere'"),
        ("reward_package_of_a_user.good.two", ValueError, "has no 'two'; it has one"),
        ("reward_package_of_a_user.good.oen", ValueError, "has no 'oen'; it has one$"),
        ("reward_package_of_a_user.good.NUMBER", TypeError, "is of type int; expected something to call"),
        ("reward_package_of_a_user.broken.one", RuntimeError, "No module named 'a_package_that_is_not_there'"),
        ("reward_package_of_a_user.raising.one", RuntimeError, "ZeroDivisionError"),
        ("collections.OrderedDict", TypeError, "is a class; give an instance"),
        ("owner/reward-model", ValueError, "give onetrunk.rewards.ModelReward"),
        ("one", ValueError, "neither 'package.module.name' nor"),
        ("my_reward", ValueError, "nor a reward model: a folder that exists or a Hub name 'owner/model'"),
        ("nowhere.py:one", ValueError, r"there is no Python file nowhere.py \(working folder /.*\)"),
        ("rewards.py", ValueError, "names a file; write 'rewards.py:NAME'"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_with_the_reason(package, spec, error, reason):
    with pytest.raises(error, match=reason):
        resolve_reward(spec)


def test_folders_and_hub_names_are_models_and_all_else_is_a_function(tmp_path):
    for model in (str(tmp_path), "owner/reward-model", "./a/missing/folder"):
        assert names_a_model(model)
    for function in ("my_reward", "package.module.name", "rewards.py", "folder/rewards.py", "folder/rewards.py:one"):
        assert not names_a_model(function)


def test_a_file_that_fails_is_reported_each_time_with_its_cause(package):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="raising.py failed: ZeroDivisionError") as caught:
            resolve_reward(f"{package / 'raising.py'}:one")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(TypeError, match="3 is of type int"):
        resolve_reward(3)
