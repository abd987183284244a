"""What XLA measured on a GPU is kept for that card and release, and reaches the next compile."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax._src import compilation_cache, compiler
from shipped import shipped_options

from jitney.engine.core.executor.autotuning import _SHIPPED, RESULTS, _folder_name, programs_folder

CARD = SimpleNamespace(
    platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0"
)
NAME = f"nvidia-h100-80gb-hbm3-9.0-jaxlib-{version('jaxlib')}"


def test_a_card_and_a_release_have_a_folder_each():
    names = {
        _folder_name("NVIDIA H100 80GB HBM3", "9.0"),
        _folder_name("NVIDIA H100 PCIe", "9.0"),
        _folder_name("NVIDIA H100 80GB HBM3", "9.0", "0.12.0"),
        _folder_name("NVIDIA L4", "8.9"),
    }
    assert len(names) == 4 and NAME in names


def test_a_cpu_keeps_its_programs_where_they_were(tmp_path: Path):
    assert programs_folder(tmp_path, jax.devices()[0]) == tmp_path
    assert not list(tmp_path.iterdir())


def test_what_was_shipped_is_there_and_what_was_measured_here_stays(tmp_path: Path):
    shipped, programs = tmp_path / "shipped", tmp_path / "programs"
    (shipped / NAME).mkdir(parents=True)
    (shipped / NAME / "a.textproto").write_text("shipped a")
    (shipped / NAME / "b.textproto").write_text("shipped b")
    results = programs / NAME / RESULTS
    results.mkdir(parents=True)
    (results / "b.textproto").write_text("measured b")
    for _ in range(2):
        assert programs_folder(programs, CARD, shipped) == programs / NAME
        found = {path.name: path.read_text() for path in results.iterdir()}
        assert found == {"a.textproto": "shipped a", "b.textproto": "measured b"}


def test_nothing_shipped_leaves_an_empty_folder(tmp_path: Path):
    folder = programs_folder(tmp_path, CARD, tmp_path / "none")
    assert list((folder / RESULTS).iterdir()) == []


def test_the_folder_reaches_the_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """jax tells XLA of the folder in every compile, and that it may write."""
    folder = programs_folder(tmp_path, CARD)
    monkeypatch.setattr(compilation_cache, "is_persistent_cache_enabled", lambda: True)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(folder))
    try:
        options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    told = options.executable_build_options.debug_options
    assert told.xla_gpu_per_fusion_autotune_cache_dir == str(folder / RESULTS)
    assert (folder / RESULTS).is_dir()
    assert "UPDATE" in str(told.xla_gpu_experimental_autotune_cache_mode)


def test_compiling_without_the_card_takes_what_was_shipped(tmp_path: Path):
    for name in (NAME, "nvidia-h100-pcie-9.0-jaxlib-0.1.0", "nvidia-l4-8.9-jaxlib-0.1.0"):
        (tmp_path / name).mkdir()
    assert shipped_options("h100", "9.0", tmp_path)[RESULTS] == str(tmp_path / NAME)
    assert shipped_options("l4", "8.9", tmp_path) == {}  # of another release
    assert shipped_options("100", "9.0", tmp_path) == {}


def test_what_is_shipped_has_names_that_are_found():
    for folder in _SHIPPED.iterdir():
        assert folder.name == "README.md" or "-jaxlib-" in folder.name
