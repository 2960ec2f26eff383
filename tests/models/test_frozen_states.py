"""The places where trunk states are kept: the same bits everywhere, and nothing left behind."""

import os
import resource
import subprocess
import sys

import pytest
import torch

from onetrunk.costs import host_memory_bytes
from onetrunk.models.frozen_layers import DEVICE_SHARE, HOST_SHARE, TrunkCache, choose_place

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["device", "cpu", "disk"])
def test_every_place_gives_back_the_same_bits(tmp_path, place, dtype):
    states = torch.randn(3, 7, 16).to(dtype)
    kept = TrunkCache(place, tmp_path).keep(states)
    assert kept.dtype == dtype and torch.equal(kept, states)


def test_the_disk_holds_them_without_a_name_and_gives_their_room_back(tmp_path):
    kept = TrunkCache("disk", tmp_path / "not" / "yet").keep(torch.arange(2 * 3 * 4.0).view(2, 3, 4))
    assert not [file for _, _, files in os.walk(tmp_path) for file in files]
    mapped = [line for line in open("/proc/self/maps") if ".trunk-states-" in line]
    assert mapped and all("(deleted)" in line for line in mapped)
    assert kept.sum() == sum(range(24))
    del kept
    assert not [line for line in open("/proc/self/maps") if ".trunk-states-" in line]


def test_a_disk_without_room_is_named_and_nothing_stays(tmp_path):
    # In a process of its own: the limit on a file's size cannot be raised again.
    code = f"""
import resource, signal, torch
from onetrunk.models.frozen_layers import TrunkCache
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    TrunkCache("disk", {str(tmp_path)!r}).keep(torch.zeros(4, 64, 64))
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1500)
    assert "no room for 0 MiB" in done.stdout and "trunk_cache to 'off'" in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def test_auto_takes_the_first_place_with_room():
    assert choose_place("auto", 1, CPU) == "cpu"
    assert choose_place("auto", int(HOST_SHARE * host_memory_bytes()) + 1, CPU) == "disk"
    assert choose_place("disk", 1, CPU) == "disk"


@pytest.mark.gpu
def test_auto_prefers_the_gpu_and_leaves_room_on_it():
    device = torch.device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    assert choose_place("auto", 1, device) == "device"
    assert choose_place("auto", int(DEVICE_SHARE * total) + 1, device) in ("cpu", "disk")
    states = torch.randn(3, 7, 16, device=device)
    kept = TrunkCache("cpu").keep(states)
    assert kept.is_pinned() and torch.equal(kept.to(device), states)
