"""The functions behind entry points: they register by name, import nothing heavy, and never raise."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from msa_tiles.compat import plugins

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
REGISTRY = "vllm.model_executor.models.registry"


@pytest.fixture
def registered(monkeypatch):
    """What a vLLM that knows these models, and another one, is told."""
    told = {}
    known = dict.fromkeys([*plugins.VLLM_MODELS, "LlamaForCausalLM"], "vLLM's")
    registry = ModuleType(REGISTRY)
    registry.ModelRegistry = SimpleNamespace(models=known, register_model=told.__setitem__)
    parts = REGISTRY.split(".")
    for length in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(parts[length - 1]))
    monkeypatch.setitem(sys.modules, REGISTRY, registry)
    monkeypatch.delenv("MSA_TILES_VLLM", raising=False)
    return SimpleNamespace(told=told, known=known, registry=registry)


def test_vllm_is_told_where_its_models_are(registered):
    for _ in range(2):  # a process may load plugins again
        plugins.vllm()
    assert registered.told == {name: f"msa_tiles.compat.vllm.model:{name}" for name in plugins.VLLM_MODELS}
    assert "msa_tiles.compat.vllm.model" not in sys.modules


def test_a_vllm_without_these_models_is_left_alone(registered):
    del registered.known["MiniMaxM3MTP"]
    plugins.vllm()
    assert set(registered.told) == {*plugins.VLLM_MODELS} - {"MiniMaxM3MTP"}


@pytest.mark.parametrize("value", ["0", " off ", "False"])
def test_vllm_can_be_left_alone(registered, monkeypatch, caplog, value):
    monkeypatch.setenv("MSA_TILES_VLLM", value)
    with caplog.at_level(logging.INFO, logger="vllm.msa_tiles"):
        plugins.vllm()
    assert not registered.told and "MSA_TILES_VLLM" in caplog.text


@pytest.mark.parametrize("value", ["1", "", "yes"])
def test_other_values_change_nothing(registered, monkeypatch, value):
    monkeypatch.setenv("MSA_TILES_VLLM", value)
    plugins.vllm()
    assert registered.told


def test_a_plugin_never_raises(registered, monkeypatch, caplog):
    def broken(name, where):
        raise RuntimeError("another vLLM")

    registered.registry.ModelRegistry.register_model = broken
    plugins.vllm()
    assert "another vLLM" in caplog.text
    monkeypatch.setitem(sys.modules, REGISTRY, None)  # import raises ModuleNotFoundError
    plugins.vllm()


@pytest.fixture
def hooked(monkeypatch):
    """What an SGLang's registry of hooks is told."""
    told = []
    registry = ModuleType("hook_registry")
    registry.HookType = SimpleNamespace(AROUND="around")
    registry.HookRegistry = SimpleNamespace(register=lambda *given: told.append(given))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
    monkeypatch.delenv("MSA_TILES_SGLANG", raising=False)
    return SimpleNamespace(told=told, registry=registry)


def test_sglang_is_told_what_to_wrap(hooked):
    plugins.sglang()
    targets = [target.removeprefix(f"{plugins.SGLANG_MODULE}.") for target, _, _ in hooked.told]
    assert targets == ["minimax_sparse_prefill", "minimax_sparse_decode"]
    assert {kind for *_, kind in hooked.told} == {"around"}


def test_sglang_can_be_left_alone(hooked, monkeypatch, caplog):
    monkeypatch.setenv("MSA_TILES_SGLANG", "0")
    with caplog.at_level(logging.INFO, logger="sglang.msa_tiles"):
        plugins.sglang()
    assert not hooked.told and "MSA_TILES_SGLANG" in caplog.text


def test_sglangs_plugin_never_raises(hooked, caplog):
    del hooked.registry.HookRegistry
    plugins.sglang()
    assert "its plugin failed" in caplog.text


@pytest.mark.parametrize(("name", "server"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_a_server_that_is_not_installed_is_named_without_a_traceback(name, server, monkeypatch, caplog):
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [_NotInstalled(name), *sys.meta_path])
    getattr(plugins, name)()
    [record] = caplog.records
    assert record.getMessage() == f"msa_tiles has nothing to do for {server}, which is not installed"
    assert record.exc_info is None


class _NotInstalled:
    """A finder that knows one package not to be there."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize(("group", "function"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")])
def test_entry_points_name_functions_that_are_there(group, function):
    section = re.search(rf'\[project\.entry-points\."{re.escape(group)}"\]\n(.*?)\n\n', PROJECT.read_text(), re.S)
    assert section and section[1] == f'msa_tiles = "msa_tiles.compat.plugins:{function}"'
    assert callable(getattr(plugins, function))


def test_a_plugin_imports_nothing_heavy():
    code = "import sys; from msa_tiles.compat import plugins; plugins.vllm(); plugins.sglang(); "
    code += "print(*{'torch', 'tvm_ffi', 'numpy', 'msa_tiles.ops'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
