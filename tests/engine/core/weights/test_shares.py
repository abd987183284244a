"""Weights go from the file to the device that holds them, a share at a time, and come to the same
bits as if the whole had been rounded on one device.

Devices are parts of this CPU, in one process of their own: `loading_program`.
"""

from __future__ import annotations

import numpy as np
import pytest
from many_devices import run_on_devices

from jitney.engine.core.models.quantization import Packed

#: Formats of 4 bits that `loading_program` makes up.
STORED = ("gptq", "awq", "q4_k")
#: Of these, words along the inputs, and blocks that devices share, are read from files.
READ = ("gptq", "q4_k")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What `loading_program` found, by name."""
    return run_on_devices("loading_program.py", tmp_path_factory.mktemp("shares"))


@pytest.mark.parametrize("scheme", [*Packed.schemes, *STORED])
def test_a_share_has_the_bits_of_the_whole(results: dict[str, np.ndarray], scheme: str):
    """Also of matrices that the checkpoint has in 4 bits, taken as they are: of Q4_K with heads in
    another order, and inputs that are split within a block.
    """
    wrong, compared = results[f"bits {scheme}"]
    assert wrong == 0 and compared >= 4 * 9


def test_random_weights_are_split_as_loaded_ones(results: dict[str, np.ndarray]):
    unlike, compared = results["random"]
    assert unlike == 0 and compared >= 9


@pytest.mark.parametrize("stored", READ)
def test_a_matrix_in_4_bits_goes_to_its_shares_as_it_is_stored(
    results: dict[str, np.ndarray], stored: str
):
    """A device has gate and up finished, each by itself and side by side, and no more of what is
    stored than its share; Q4_K's scales take 1.3 times the bytes once they are float32, and its
    blocks are read by both devices that share one.
    """
    read, all_bytes, on_host, beside, largest, _ = results[f"sizes {stored} 4"]
    assert 0 < beside < (3.2 if stored == "q4_k" else 2.2) * largest / 4
    assert all_bytes <= read < (1.4 if stored == "q4_k" else 1.05) * all_bytes
    assert on_host < 1.01 * largest


@pytest.mark.parametrize("stored", READ)
def test_a_host_reads_what_its_devices_hold(results: dict[str, np.ndarray], stored: str):
    """Two of four devices; of Q4_K blocks of 256 inputs around the 448 of each, too."""
    wrong, compared, read, all_bytes = results[f"half {stored}"]
    assert wrong == 0 and compared >= 2 * 4 * 3
    assert read < (0.75 if stored == "q4_k" else 0.55) * all_bytes


@pytest.mark.parametrize(("scheme", "devices"), [("int4", 4), ("plain", 8)])
def test_the_file_is_read_once_and_a_device_holds_its_share_and_less_than_a_tensor_beside(
    results: dict[str, np.ndarray], scheme: str, devices: int
):
    """A share as it is stored and, before it is forgotten, the same finished; the host holds one
    tensor. Norms, and the KV heads that several devices share, are read for each.
    """
    read, stored, on_host, beside, largest, kept = results[f"sizes {scheme} {devices}"]
    assert 0 < beside < 1.01 * 2 * largest / devices  # and norms
    assert kept > 0
    assert stored < read < 1.1 * stored
    assert on_host < 1.01 * largest


def test_a_tensor_of_70_billion_weights_fits_beside_a_share(results: dict[str, np.ndarray]):
    """Over four devices, all that one needs to round its share is less than the matrix in bfloat16:
    gate and up 0.94 GB, down 0.47, the head 2.1.
    """
    for taken, whole in results["fullest"]:
        assert 0.25 * whole < taken < 0.9 * whole


@pytest.mark.parametrize("stored", READ)
def test_a_stored_matrix_of_70_billion_weights_fits_beside_a_share(
    results: dict[str, np.ndarray], stored: str
):
    """Over four devices: of gate, and of down, as many bytes as all that one needs to lay out its
    share, its share included.
    """
    for taken, whole in results[f"fullest {stored}"]:
        assert 0.125 * whole < taken < (0.4 if stored == "q4_k" else 0.15) * whole


def test_scales_know_what_other_hosts_hold(results: dict[str, np.ndarray]):
    wrong, compared = results["elsewhere"]
    assert wrong == 0 and compared > 100_000
