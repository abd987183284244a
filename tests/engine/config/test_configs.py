"""The files in configs/: each loads, fits its device by the planner's arithmetic, and its comments
say what is true.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from places import CONFIGS

from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.config.schema import Config
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.lab.commands.plan import _COMMAND, plan
from jitney.engine.lab.simulation.planner import Load, Sizing
from jitney.engine.lab.simulation.roofline import Roofline, _find_shape

FOLDER = CONFIGS
FILES = sorted(FOLDER.glob("*.toml"))
ON_DEVICES = [file for file in FILES if file.stem != "cpu"]
WEIGHTS = {"plain": "bf16", "auto": "bf16"}


def command(file: Path) -> list[str]:
    """The words after `jitney plan` in the file's comments."""
    (line,) = re.findall(r"^#   jitney plan (.*)$", file.read_text(), re.MULTILINE)
    return line.split()


def comments(file: Path) -> str:
    """All comment lines as one, with single spaces."""
    lines = [line.lstrip("# ") for line in file.read_text().splitlines() if line.startswith("#")]
    return " ".join(" ".join(lines).split())


def buckets(config: Config, on_device: bool) -> Buckets:
    engine = config.engine
    return Buckets.of(
        max_seats=engine.max_seats,
        token_budget=engine.token_budget,
        seat_sizes=engine.seat_buckets,
        token_sizes=engine.token_buckets,
        on_device=on_device,
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_loads(file: Path):
    config = ResolvedConfig.load(file).config
    assert max(map(len, file.read_text().splitlines())) <= 130
    assert config.server.host == "127.0.0.1"  # no file opens a port to the network
    assert len(buckets(config, file.stem != "cpu").all()) <= 12


@pytest.mark.parametrize("file", ON_DEVICES, ids=lambda file: file.stem)
def test_the_planned_deployment_is_the_configured_one(file: Path):
    config, known = ResolvedConfig.load(file).config, _COMMAND.parse(command(file))
    engine, model = config.engine, config.model
    assert config.model.id.rpartition("/")[2].lower() == known.model
    assert known.weights == WEIGHTS.get(model.weights, model.weights)
    assert known.kv == WEIGHTS.get(engine.kv_dtype, engine.kv_dtype)
    assert (known.count, known.token_budget, known.page_size) == (
        engine.tensor_parallel,
        engine.token_budget,
        engine.page_size,
    )
    assert model.context <= _find_shape(known.model).context_length
    assert engine.platform == ("tpu" if known.device.startswith("v") else "cuda")


@pytest.mark.parametrize("file", ON_DEVICES, ids=lambda file: file.stem)
def test_weights_and_the_keys_of_all_seats_fit(file: Path):
    config, known = ResolvedConfig.load(file).config, _COMMAND.parse(command(file))
    roofline = Roofline.named(
        known.model, known.device, weights=known.weights, kv=known.kv, count=known.count
    )
    sizing = Sizing.of(
        roofline,
        Load(
            known.prompt, known.output, token_budget=known.token_budget, page_size=known.page_size
        ),
    )
    memory, device = sizing.memory, roofline.device
    assert memory.weight_bytes + memory.positions * memory.kv_bytes_per_token <= (
        device.memory * known.count * roofline.assumed.memory
    )
    assert memory.seats_mean >= config.engine.max_seats
    assert sizing.chosen is not None and sizing.chosen.seats <= config.engine.max_seats
    assert memory.positions >= config.model.context  # one sequence of the whole context is served
    shape = roofline.cost.config
    assert not any(
        size % known.count
        for size in (shape.n_heads, shape.n_kv_heads, shape.intermediate_size, shape.vocab_size)
    )


@pytest.mark.parametrize("file", ON_DEVICES, ids=lambda file: file.stem)
def test_the_comments_give_the_planner_s_own_answers(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "400")
    assert plan(command(file)) == 0
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("memory:", "chosen:"))
    ]
    assert len(lines) == 2
    for line in lines:
        assert line in comments(file)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_sizes_named_in_comments_are_those_that_are_compiled(file: Path):
    made = buckets(ResolvedConfig.load(file).config, file.stem != "cpu")
    text = file.read_text()
    for kind, sizes in (
        ("decode-only", [b.seats for b in made.decode]),
        ("mixed", [b.tokens for b in made.mixed]),
    ):
        for named in re.findall(rf"{kind} programs have ([\d, and]+?) rows", text):
            assert [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?<!,)", named)] == sizes
