"""The package's build backend: setuptools, and CPU kernels compiled ahead of time.

A wheel has a library for every instruction set level, an editable install one for this CPU. The
header comes from jaxlib, a build requirement, and a compiler from `ziglang` if the system has none.
If the kernels cannot be compiled, the package still installs, and the reference kernels run with a
warning.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  (hooks that are not changed)
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

_ROOT = Path(__file__).parents[2]
_Settings = dict[str, Any] | None


def _build_module() -> ModuleType:
    """`jitney.kernels.cpu.build`, loaded from its file since the package is not installed yet."""
    spec = importlib.util.spec_from_file_location(
        "jitney_kernels_build", Path(__file__).parent / "build.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _has_levels() -> bool:
    """Whether the kernels support machines of this kind."""
    build = _build_module()
    try:
        return bool(build.Level.of_machine())
    except build.BuildError:
        return False


def _requirements() -> list[str]:
    """Build requirements besides setuptools: jaxlib in the version of jax, and a compiler if none
    is present.
    """
    if not _has_levels():
        return []
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    jax = next(line for line in project["dependencies"] if line.startswith("jax>"))
    needed = [f"jaxlib{jax.removeprefix('jax')}"]
    build = _build_module()
    try:
        build.compiler()
    except build.BuildError:
        needed.append("ziglang>=0.14")
    return needed


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_requirements()]


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_requirements()]


def _compile_kernels(every_level: bool) -> bool:
    """Compile the kernels; prints why and returns False if none could be compiled."""
    build = _build_module()
    made = []
    try:
        levels = build.Level.of_machine() if every_level else build.Level.here()[:1]
    except build.BuildError as error:
        print(f"the CPU kernels are not compiled: {error}", file=sys.stderr)
        return False
    for level in levels:
        try:
            made += build.build([level])
        except build.BuildError as error:
            print(f"the CPU kernels are not compiled for {level.name}: {error}", file=sys.stderr)
    return bool(made)


def build_wheel(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """A wheel for this platform with every library that compiled, for any platform if none did."""
    settings = dict(config_settings or {})
    if _compile_kernels(every_level=True):
        name = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        settings["--build-option"] = ["--plat-name", name]
    return build_meta.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """An editable install, with the library for this CPU beside its sources."""
    _compile_kernels(every_level=False)
    return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
