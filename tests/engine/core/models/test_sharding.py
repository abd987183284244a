"""One model over several devices: the same logits, less memory each, and nothing sent in vain;
`test_sharding_families` has whole engines.

Devices are parts of this CPU, which a process of its own has to ask for: `sharding_program` does
all the running.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from many_devices import run_on_devices
from reference_logits import DATA, SCRIPT, weights_of, write_folder

from jitney.engine import LLM
from jitney.engine.cli import doctor
from jitney.engine.common.errors import ConfigError
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.core.executor.memory import PoolShares, PoolSizes, likely_temp_bytes
from jitney.engine.core.executor.pool_sizing import sized_programs
from jitney.engine.core.executor.program import StateSizes
from jitney.engine.core.executor.vocabulary import Vocabulary, _first_best
from jitney.engine.core.models.llama import _lookup
from jitney.engine.core.models.sharding import DATA as ENGINES
from jitney.engine.core.models.sharding import TENSOR, Shares
from jitney.engine.core.scheduler.buckets import Buckets
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.layer_configs import ExpertsConfig
from jitney.engine.core.weights.checkpoints.model_config import ModelConfig
from jitney.engine.core.weights.load import _most_elsewhere
from jitney.kernels import definitions

#: One family for each way to share a layer: biases, norms of query and key heads, norms over all of
#: them, fused matrices with heads in another order, halves side by side, experts, recurrent layers,
#: latents that every device has, and norms behind halves; 4 query and 2 KV heads, so that two of
#: four devices share a KV head.
CASES = (
    ("llama2_biases", 4),
    ("qwen3", 2),
    ("olmo2", 4),
    ("phi3", 4),
    ("cohere2", 4),
    ("qwen3_moe", 4),
    ("qwen3_next", 4),
    ("lfm2", 2),
    ("granite4_h", 4),
    ("nemotron_h", 2),
    ("mistral4", 4),
    ("gemma4", 2),
    ("muse_glimmer", 4),
)


# The program compiles for minutes where processors are busy.
pytestmark = pytest.mark.timeout(1200)

#: What a job is told of dtype, scheme and pools.
PLAIN, INT8 = ("float32", "plain", ""), ("float32", "int8", "")
KEPT_AS = "float32", "auto", ""
#: Of these what is proved is compared: devices that share KV heads, groups of experts, and engines
#: that share experts.
PROVED = {
    "llama": ("llama", 4, 1),
    "qwen3_moe": ("qwen3_moe", 4, 2),
    "mixtral of two engines": ("mixtral", 2, 1, 2),
}


#: With whole experts on each of two groups of devices: how many devices in all, and what they are
#: told. One has a layer without experts, the other's are kept in MXFP4.
GROUPED = {"deepseek_v2": (2, *PLAIN), "gpt_oss_mxfp4": (4, *KEPT_AS)}
#: Engines that share experts: how many, devices of each, and rows of each in the step: all, a few,
#: or none; then scheme, pools and groups.
JOINED: dict[str, tuple[Any, ...]] = {
    "two engines with biases": ("gpt_oss", 2, 2, [48, 9]),
    "two engines beside a feed-forward": ("gemma4_experts", 2, 2, [9, 48]),
    "two engines in groups": ("mixtral", 2, 2, [0, 48], "plain", "", 2),
}
#: Compared with one engine alone.
JOINED_ROUNDED: dict[str, tuple[Any, ...]] = {
    "two engines in int8": ("qwen3_moe", 2, 2, [48, 9], "int8"),
}


#: Products of rows in fp8: devices, and whether each has other inputs, else other outputs.
FP8_PRODUCTS = ((2, False), (4, True))


def jobs(folders: dict[str, str]) -> list[tuple[str, str, list[Any]]]:
    prompt = [int(token) for token in SCRIPT.prompt()]
    found: list[tuple[str, str, list[Any]]] = [
        (f"{case} {n}", "logits", [folders[case], n, prompt]) for case, n in CASES
    ]
    found += [
        (f"{case} in groups", "logits", [folders[case], n, prompt, *stored, 2])
        for case, (n, *stored) in GROUPED.items()
    ]
    found.append(("padded", "logits", [folders["qwen3"], 2, prompt, *PLAIN, 1, 96]))
    # The rows of experts' products in int8, whose scales those of a group find together.
    found += [
        (f"int8 experts {n}", "logits", [folders["qwen3_moe"], n, prompt, *INT8, groups])
        for n, groups in ((1, 1), (4, 2))
    ]
    found += [(f"proved {name}", "proved_shapes", list(case)) for name, case in PROVED.items()]
    found += [
        (name, "joined_logits", [folders[case], engines, n, counts, prompt, *how])
        for name, (case, engines, n, counts, *how) in (JOINED | JOINED_ROUNDED).items()
    ]
    found += [(f"fp8 {n} {by}", "fp8_product", [n, by]) for n, by in FP8_PRODUCTS]
    found.append(("program of engines", "program", [2, True, [4, 4], "mixtral", 1, 2]))
    found.append(("scores of engines", "program", [2, False, [64, 4], "mixtral", 1, 2]))
    found.append(("program in 2", "program", [2, True, [4, 4], "mixtral", 2]))
    found += [
        (f"bfloat16 {n}", "logits", [folders["qwen3"], n, prompt, "bfloat16"]) for n in (1, 2)
    ]
    found += [
        (
            f"int8 KV {n}",
            "logits",
            [folders["llama2_biases"], n, prompt, "float32", "plain", "int8"],
        )
        for n in (1, 4)
    ]
    found.append(("program of a sampling step", "program", [2, False, [64, 4]]))
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What `sharding_program` made of all the jobs, by name."""
    folder = tmp_path_factory.mktemp("sharding")
    names = {*dict(CASES), *GROUPED, *(case for case, *_ in JOINED.values())}
    folders = {}
    for name in sorted(names):
        case = DATA["cases"][name]
        folders[name] = write_folder(folder / name, case["config"], weights_of(case))
    return run_on_devices("sharding_program.py", folder, jobs(folders))


@pytest.mark.parametrize(("case", "how"), [*CASES, *((case, "in groups") for case in GROUPED)])
def test_logits_equal_transformers(results: dict[str, np.ndarray], case: str, how: int | str):
    """Of so many devices, or of groups of devices with whole experts."""
    expected = np.array(DATA["cases"][case]["logits"])
    np.testing.assert_allclose(results[f"{case} {how}"][DATA["rows"]], expected, atol=1e-4, rtol=0)


def test_a_padded_share_of_the_embeddings_is_read_without_its_padding(
    results: dict[str, np.ndarray],
):
    np.testing.assert_array_equal(results["padded"], results["qwen3 2"])


@pytest.mark.parametrize("name", list(PROVED))
def test_kernels_are_proved_in_one_devices_shapes_with_and_without_weights(
    results: dict[str, np.ndarray], name: str
):
    loaded, without = results[f"proved {name}"]
    assert without == loaded and "Matrix(" in loaded


@pytest.mark.parametrize("name", list(JOINED))
def test_engines_that_share_experts_have_logits_of_their_own(
    results: dict[str, np.ndarray], name: str
):
    case, _, _, counts, *_ = JOINED[name]
    expected = np.array(DATA["cases"][case]["logits"])
    rows = np.array(DATA["rows"])
    for own, count in zip(results[name], counts, strict=True):
        known = rows[rows < count]
        np.testing.assert_allclose(own[known], expected[: len(known)], atol=1e-4, rtol=0)


def test_engines_that_share_experts_round_as_one_does(results: dict[str, np.ndarray]):
    alone = results["int8 experts 1"]
    for own, count in zip(results["two engines in int8"], (48, 9), strict=True):
        np.testing.assert_allclose(own[:count], alone[:count], atol=1e-4)


def test_engines_that_share_experts_send_rows_there_and_sums_back(results: dict[str, np.ndarray]):
    """Beside what an engine of two devices sends: once a step how many rows each has, and in each
    layer one all-gather and one reduce-scatter.
    """
    reduces, gathers, widest, pools, aliased, scatters = results["program of engines"]
    width = tiny_config("mixtral").hidden_size
    assert reduces == 2 * 2 + 1
    assert gathers == 1 + 1 + 2 and widest == 2 * 4 * width
    assert scatters == 2
    assert aliased >= pools


def test_a_sampling_step_of_several_engines_keeps_its_state(results: dict[str, np.ndarray]):
    *_, pools, aliased, scatters = results["scores of engines"]
    assert scatters > 2  # blocks of scored rows have a last feed-forward each
    assert aliased >= pools


def test_a_group_rounds_its_experts_as_one_device_does(results: dict[str, np.ndarray]):
    one = results["int8 experts 1"]
    np.testing.assert_allclose(results["int8 experts 4"], one, atol=1e-4)
    assert np.abs(one - results["qwen3_moe 4"]).max() > 1e-3


def test_groups_send_no_more_than_shares_of_experts_do(results: dict[str, np.ndarray]):
    reduces, gathers, widest, pools, aliased, _ = results["program in 2"]
    assert reduces == 2 * 2 + 1
    assert gathers == 1 and widest == 2 * 2 * 4
    assert aliased >= pools


def test_bfloat16_sums_are_as_near_as_those_of_one_device(results: dict[str, np.ndarray]):
    """Partial sums travel in bfloat16; each loses at most what rounding the whole sum loses
    anyway.
    """
    exact = results["qwen3 2"]
    error = {n: np.sqrt(np.mean((results[f"bfloat16 {n}"] - exact) ** 2)) for n in (1, 2)}
    assert 0 < error[1] < 0.05 * exact.std()
    assert error[2] < 1.5 * error[1]


@pytest.mark.parametrize(("count", "by_inputs"), FP8_PRODUCTS)
def test_each_device_rounds_its_own_share_of_a_row_to_fp8(
    results: dict[str, np.ndarray], count: int, by_inputs: bool
):
    """Where the inputs are split, by a unit of its own: one for the whole row would lose the small
    inputs of some devices. Where outputs are, all have the whole row, and the same unit.
    """
    of = f"fp8 {count} {by_inputs}"
    x, scale, found = results[f"{of} x"], results[f"{of} scale"], results[f"{of} y"]
    w = results[f"{of} w"].astype(jnp.float8_e4m3fn)
    whole = definitions.matmul_fp8(x, w, scale)
    parts = count if by_inputs else 1
    shares = zip(np.split(x, parts, axis=1), np.split(w, parts), strict=True)
    expected = sum(definitions.matmul_fp8(rows, weights, scale) for rows, weights in shares)
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())
    assert (np.abs(found - whole).max() > 1e-4) == by_inputs


def test_factors_of_quantised_pools_split_with_their_heads(results: dict[str, np.ndarray]):
    """A key that float noise puts on the other side of a step moves the logits by a step's worth,
    no more.
    """
    quantised = results["int8 KV 1"] - results["llama2_biases 4"]
    assert np.abs(results["int8 KV 4"] - results["int8 KV 1"]).max() < 0.2 * np.abs(quantised).max()


def test_a_sampling_step_leaves_the_logits_where_they_are(results: dict[str, np.ndarray]):
    """What travels: sums of lanes and the best 20 of each of 4 rows, or of a block of 64 scored
    ones; never 512 logits a row."""
    reduces, gathers, widest, pools, aliased, _ = results["program of a sampling step"]
    assert reduces > 5 and gathers > 0
    assert widest <= 64 * 2 * 20
    assert aliased >= pools


def on_each(function: Any, *shares: Any) -> np.ndarray:
    """What devices with these shares get, by vmap in their place."""
    return np.asarray(
        jax.vmap(function, axis_name=TENSOR.name)(*(jnp.asarray(share) for share in shares))
    )


def test_lookup_in_a_split_table():
    table = np.arange(12, dtype=np.float32).reshape(2, 3, 2)  # two devices with three rows each
    tokens = np.tile([5, 0, 2, 3], (2, 1))
    np.testing.assert_array_equal(
        on_each(_lookup, table, tokens), [[[10, 11], [0, 1], [4, 5], [6, 7]]] * 2
    )


def test_the_best_of_all_devices_is_the_first_of_the_greatest():
    logits = np.array(
        [
            [[1, 3, 3], [0, 1, 2], [5, 0, 0], [7, 7, 7]],
            [[3, 2, 1], [0, 9, 9], [0, np.nan, 0], [np.inf, 0, 0]],
        ],
        np.float32,
    )  # [devices, rows, columns]
    tokens = on_each(lambda x: _first_best(jnp.max(x, axis=-1), Vocabulary().greedy(x), 3), logits)
    np.testing.assert_array_equal(tokens, [[1, 4, -1, -1]] * 2)


def shares_of(config: ModelConfig, devices: int) -> Shares:
    engines = 1 if config.experts is None else config.experts.engines
    sizes, names = (devices // engines,), (TENSOR.name,)
    if engines > 1:
        sizes, names = (engines, *sizes), (ENGINES.name, *names)
    return Shares(config, AbstractMesh(sizes, names))  # pyright: ignore[reportArgumentType]


def share_of(
    config: ModelConfig, path: tuple[str | int, ...], array: np.ndarray, devices: int
) -> list[list[int]]:
    shares = shares_of(config, devices)
    return [shares.cut(path, array, device).ravel().tolist() for device in range(devices)]


#: Four query heads, two KV heads, a head of two columns, four feed-forward columns.
SMALL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=4,
    hidden_size=1,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    head_dim=2,
    intermediate_size=4,
    windows=(0,),
    context_length=8,
)
QKV = np.array([[0, 1, 10, 11, 20, 21, 30, 31, 100, 101, 110, 111, 200, 201, 210, 211]])


@pytest.mark.parametrize(
    ("path", "array", "shares"),
    [
        (
            ("layers", 0, "attention", "qkv", "kernel"),
            QKV,
            [[0, 1, 10, 11, 100, 101, 200, 201], [20, 21, 30, 31, 110, 111, 210, 211]],
        ),
        (
            ("layers", 0, "attention", "qkv", "kernel"),
            QKV,
            [
                [0, 1, 100, 101, 200, 201],
                [10, 11, 100, 101, 200, 201],
                [20, 21, 110, 111, 210, 211],
                [30, 31, 110, 111, 210, 211],
            ],
        ),
        (
            ("layers", 0, "mlp", "gate_up", "scale"),
            np.array([0, 1, 2, 3, 10, 11, 12, 13]),
            [[0, 1, 10, 11], [2, 3, 12, 13]],
        ),
        (("layers", 0, "mlp", "down", "kernel"), np.array([[0], [1], [2], [3]]), [[0, 1], [2, 3]]),
        (("layers", 0, "mlp", "down", "scale"), np.array([7, 8]), [[7, 8], [7, 8]]),
        (("layers", 0, "mlp", "down", "bias"), np.array([7]), [[7], [7]]),
        (("layers", 0, "attention", "kv_scales"), np.array([1, 2, 3, 4]), [[1, 2], [3, 4]]),
        (
            ("layers", 0, "attention", "kv_scales"),
            np.array([1, 2, 3, 4]),
            [[1, 2], [1, 2], [3, 4], [3, 4]],
        ),
        (("layers", 0, "attention_norm", "weight"), np.array([5, 6]), [[5, 6], [5, 6]]),
        (
            ("layers", 0, "attention", "wide_q_norm", "weight"),
            QKV[0, :8],
            [[0, 1], [10, 11], [20, 21], [30, 31]],
        ),
        (
            ("layers", 0, "attention", "wide_k_norm", "weight"),
            QKV[0, 8:12],
            [[100, 101], [100, 101], [110, 111], [110, 111]],
        ),
        (("layers", 0, "attention", "k_norm", "weight"), np.array([1, 2]), [[1, 2], [1, 2]]),
        (("embed",), np.array([[0], [1], [2], [3]]), [[0, 1], [2, 3]]),
        (("lm_head", "kernel"), np.array([[0, 1, 2, 3]]), [[0, 1], [2, 3]]),
    ],
    ids=str,
)
def test_each_device_gets_its_share_in_its_own_order(path, array, shares):
    assert share_of(SMALL, path, array, len(shares)) == shares


#: One input and one output; four experts of two feed-forward columns, of which each has a number.
MIXTURE = replace(
    SMALL,
    architecture="MixtralForCausalLM",
    intermediate_size=2,
    experts=ExpertsConfig(4, 1, renormalised=True, groups=2),
)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("path", "array", "shares"),
    [
        # gate and up of expert e: 10 * e + (1, 2) and 10 * e + (5, 6)
        (
            ("gate_up", "kernel"),
            np.array([[1, 2, 5, 6, 11, 12, 15, 16, 21, 22, 25, 26, 31, 32, 35, 36]]),
            [[1, 5, 11, 15], [2, 6, 12, 16], [21, 25, 31, 35], [22, 26, 32, 36]],
        ),
        (
            ("down", "kernel"),
            np.array([[1, 11, 21, 31], [2, 12, 22, 32]]),
            [[1, 11], [2, 12], [21, 31], [22, 32]],
        ),
        (("down", "scale"), np.array([1, 2, 3, 4]), [[1, 2], [1, 2], [3, 4], [3, 4]]),
        (("router",), np.array([[1, 2, 3, 4]]), [[1, 2, 3, 4]] * 4),
    ],
    ids=str,
)
def test_each_device_of_a_group_or_engine_gets_its_share_of_its_experts(
    path, array, shares, groups: int
):
    experts = ExpertsConfig(4, 1, renormalised=True, groups=groups, engines=2 // groups)
    own = replace(MIXTURE, experts=experts)
    assert share_of(own, ("layers", 0, "mlp", *path), array, 4) == shares


@pytest.mark.parametrize(
    ("path", "array", "shares"),
    [
        (
            ("layers", 0, "attention", "qkv", "kernel"),
            QKV,
            [[0, 1, 10, 11, 100, 101, 200, 201], [20, 21, 30, 31, 110, 111, 210, 211]] * 2,
        ),
        (("layers", 0, "attention", "o", "kernel"), np.array([[1], [2]]), [[1], [2]] * 2),
        (("embed",), np.array([[0], [1], [2], [3]]), [[0, 1], [2, 3]] * 2),
    ],
    ids=str,
)
def test_engines_have_all_but_experts_alike(path, array, shares):
    experts = ExpertsConfig(4, 1, renormalised=True, engines=2)
    assert share_of(replace(MIXTURE, experts=experts), path, array, 4) == shares


def test_a_share_is_cut_from_a_matrix_of_rows_of_outputs_as_well():
    shares = shares_of(MIXTURE, 4)
    path = ("layers", 0, "mlp", "down", "kernel")
    stored = np.array([[1, 2], [11, 12], [21, 22], [31, 32]])
    found = [shares.cut(path, stored, n, transposed=True).ravel().tolist() for n in range(4)]
    assert found == [[1, 11], [2, 12], [21, 31], [22, 32]]


@pytest.mark.parametrize(
    ("here", "most"),
    [
        ((0, 1), [[0, 0], [22, 32]]),  # the other host has all of the second group
        ((0, 2), [[2, 12], [22, 32]]),  # it has the second inputs of both
        ((0, 1, 2), [[0, 0], [22, 32]]),
    ],
    ids=str,
)
def test_the_greatest_elsewhere_is_that_of_the_group(here: tuple[int, ...], most: list[list[int]]):
    shares = shares_of(MIXTURE, 4)
    shares.__dict__["own_numbers"] = here
    stored = np.array([[1, -2], [11, 12], [21, 22], [31, -32]], np.float32)
    found = _most_elsewhere(("layers", 0, "mlp", "down", "kernel"), stored, shares)
    np.testing.assert_array_equal(found, most)


@pytest.mark.parametrize(
    ("family", "groups", "engines", "message"),
    [
        ("llama", 2, 1, "expert_parallel 2 deals out experts, and this model has none: leave it"),
        ("mixtral", 3, 1, "expert_parallel 3 does not divide the model's 4 experts"),
        ("llama", 1, 2, "data_parallel deals out experts, and this model has none: run engines of"),
        ("mixtral", 1, 3, "data_parallel 3 with expert_parallel 1 does not divide the model's 4"),
    ],
)
def test_experts_that_cannot_be_dealt_out(family: str, groups: int, engines: int, message: str):
    with pytest.raises(ConfigError, match=message):
        tiny_config(family).in_groups(groups, engines)


def test_groups_of_int4_inputs_are_not_torn():
    with pytest.raises(
        ConfigError, match="tensor_parallel 2 does not divide the 3 groups of inputs"
    ):
        share_of(SMALL, ("layers", 0, "mlp", "down", "scale"), np.zeros((3, 1)), 2)


def test_the_local_model():
    own = tiny_config().local(2)
    assert (
        own.n_heads,
        own.n_kv_heads,
        own.intermediate_size,
        own.vocab_size,
        own.vocab_share,
        own.shards,
    ) == (2, 1, 64, 512, 256, 2)
    assert tiny_config().local(4).n_kv_heads == 1
    assert tiny_config().local(1) == tiny_config()


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (3, "tensor_parallel 3 does not divide the model's 2 key-value heads"),
        (8, "tensor_parallel 8 does not divide the model's 4 query heads"),
    ],
)
def test_a_model_that_cannot_be_divided(shards: int, message: str):
    with pytest.raises(ConfigError, match=message):
        tiny_config().local(shards)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": 0}, "--tensor-parallel: must be greater than or equal to 1"),
        (
            {"tensor_parallel": 2, "device": "0"},
            r"device 0 must name as many different chips as tensor_parallel \(2\)",
        ),
        ({"tensor_parallel": 2, "device": "1,1"}, "device 1,1 must name as many different chips"),
        (
            {"device": "0,1"},
            r"device 0,1 must name as many different chips as tensor_parallel \(1\)",
        ),
        ({"device": "0,"}, "device"),
        (
            {"tensor_parallel": 4, "expert_parallel": 3},
            r"tensor_parallel 4 .* must be a multiple of expert_parallel \(3\)",
        ),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        ResolvedConfig.load(flags=settings)
    assert "\n" not in str(caught.value)


def test_named_chips_are_the_ones_that_jax_sees():
    chosen = ResolvedConfig.load(
        flags={"platform": "cuda", "tensor_parallel": 2, "device": "0,2"}
    ).config.engine
    assert chosen.jax_environment["CUDA_VISIBLE_DEVICES"] == "0,2"


def test_fewer_devices_than_asked_for():
    with pytest.raises(
        ConfigError, match=r"tensor_parallel 64 needs as many devices; jax sees \d+ \(cpu\)"
    ):
        LLM("tiny-random", tensor_parallel=64)


def test_doctor_counts_the_devices():
    found = list(doctor._devices(ResolvedConfig.load(flags={"tensor_parallel": 64}).config))
    assert found[0].name == "tensor parallel" and found[0].ok is False
    assert found[0].value.startswith("64 devices needed, ")
    assert "tensor parallel" not in {
        finding.name for finding in doctor._devices(ResolvedConfig.load().config)
    }


def test_doctor_says_whether_the_model_can_be_divided(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_CHECKS", {"model": doctor._model})

    def said(count: int) -> list[tuple[str, bool | None]]:
        config = ResolvedConfig.load(
            flags={"model": "tiny-random", "tensor_parallel": count}
        ).config
        found = list(doctor._examine(config))[1:]
        return [(one.value, one.ok) for one in found if one.name != "configuration"]

    assert said(2) == [("2 query and 1 key-value heads", True)]
    assert said(3) == [("tensor_parallel 3 does not divide the model's 2 key-value heads", False)]
    assert said(1) == []


class Sized(SimpleNamespace):
    """Programs that only know their size and what their steps need."""

    group_pages: tuple[int, ...]
    temporaries: int

    def largest_temp_bytes(self) -> int:
        return self.temporaries


@pytest.mark.parametrize(
    ("temporaries", "made"),
    [
        ("as likely", 1),  # what was compiled for sizing serves
        ("far less", 2),  # too much memory would lie idle
        ("more", 2),  # the pool would not fit
    ],
)
def test_the_pool_takes_what_the_fullest_device_leaves(temporaries: str, made: int):
    config = ResolvedConfig.load(
        flags={"model": "tiny-random", "max_seats": 4, "token_budget": 4096}
    ).config
    own, buckets = tiny_config().local(2), Buckets.of(max_seats=4, token_budget=4096)
    likely = likely_temp_bytes(own, buckets)
    needed = {"as likely": likely - 100_000, "far less": likely // 10, "more": likely + 100_000}[
        temporaries
    ]
    limit = 3 * likely
    chips = [
        SimpleNamespace(
            platform="gpu",
            device_kind="fake",
            memory_stats=lambda used=used: {"bytes_limit": limit, "bytes_in_use": used},
        )
        for used in (1000, likely // 2)
    ]
    runners: list[Sized] = []

    def make_runner(pools: PoolSizes) -> Sized:
        runners.append(Sized(group_pages=pools.pages, temporaries=needed))
        return runners[-1]

    page_bytes = 4096
    sizes = StateSizes(4, 1, config.engine.page_size, 256, jnp.dtype("float32"))
    programs = sized_programs(
        config.engine,
        sizes,
        chips,
        shares=PoolShares.of(own, (page_bytes,), config.engine, 256),
        temp_bytes=likely,
        make=make_runner,  # type: ignore[arg-type]
    )
    room = limit - likely // 2 - int(0.04 * limit) - needed
    assert len(runners) == made and programs is runners[-1]  # type: ignore[comparison-overlap]
    assert 0.97 * room - page_bytes <= runners[-1].group_pages[0] * page_bytes <= room
