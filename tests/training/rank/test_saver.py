"""What a rank saves, and what is left when it cannot."""

import json
import shutil
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from qurl_ray.config import load_config
from qurl_ray.data.trained import ChatSettings, kept_settings
from qurl_ray.errors import CheckpointError
from qurl_ray.learner.learner import make_learner
from qurl_ray.policy import save
from qurl_ray.policy.load import load_model, load_tokenizer
from qurl_ray.policy.save import save_policy
from qurl_ray.quant.uaq import fold
from qurl_ray.runs.checkpoint import latest, partial_folder
from qurl_ray.training.rank import saver as module
from qurl_ray.training.rank.objectives import objective_settings
from qurl_ray.training.rank.saver import Saver
from qurl_ray.types import PolicySpec
from tests.runs.test_checkpoint import hold_open, write


@pytest.fixture
def policy_with(tiny_spec, tmp_path):
    """Function that makes a policy with other settings in one of its files, and returns its spec."""

    def make(file, given):
        folder = tmp_path / "given"
        shutil.copytree(tiny_spec.source, folder)
        before = json.loads((folder / file).read_text()) if file == "config.json" else {}
        (folder / file).write_text(json.dumps(before | given))
        return PolicySpec(source=str(folder))

    return make


@pytest.fixture
def saver(saver_of, tiny_spec):
    return saver_of(tiny_spec)


@pytest.fixture
def saver_of(tmp_path):
    """Function that makes the saver of a policy, which is not trained."""
    return partial(make_saver, tmp_path)


def make_saver(tmp_path, spec, *given):
    config = load_config(None, [f"output_dir={tmp_path}", "export.quantized=none", *given])
    settings = objective_settings(config)
    learner = make_learner(load_model(spec), config.learner, settings, temperature=1.0, total_updates=1)
    coordinator = SimpleNamespace(
        state=SimpleNamespace(remote=lambda step: {"step": step}), tell=SimpleNamespace(remote=lambda event: None)
    )
    return Saver(config, learner, spec, coordinator, tmp_path, rank=0)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}


def test_the_policy_is_that_of_a_model_that_is_saved_whole(saver, tiny_spec, tmp_path, monkeypatch):
    """Settings and all; in several files where it is large."""
    saver.final()
    model = load_model(tiny_spec)
    save_policy(model, load_tokenizer(tiny_spec), tmp_path / "whole")
    assert files_of(tmp_path / "policy") == files_of(tmp_path / "whole")
    monkeypatch.setattr(save, "FILE_BYTES", 100_000)
    saver.final()
    assert len(list((tmp_path / "policy").glob("model-*-of-*.safetensors"))) > 3
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    for (name, written), expected in zip(found.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(written, expected), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("file", "given"),
    [
        ("generation_config.json", {"temperature": 0.9, "top_p": 0.6}),  # Llama 2, Vicuna
        ("generation_config.json", {"top_k": 5}),
        ("generation_config.json", {"pad_token_id": -1, "bos_token_id": 99999}),
        ("generation_config.json", {"length_penalty": 2.0, "early_stopping": True}),
        ("generation_config.json", {"use_cache": False, "cache_implementation": "static"}),
        ("generation_config.json", {"output_attentions": True, "typical_p": 0.5, "min_p": 0.1}),
        ("generation_config.json", {"a setting that nobody knows": [1, {"a": None}]}),
        ("config.json", {"pad_token_id": -1}),
        ("config.json", {"bos_token_id": -1, "eos_token_id": [1, -1]}),
        ("config.json", {"temperature": 0.5, "num_beams": 4, "max_length": 20}),
    ],
)
def test_settings_that_only_matter_for_generation_never_stop_a_checkpoint(policy_with, saver_of, tmp_path, file, given):
    spec = policy_with(file, given)
    saver_of(spec).final()
    found = load_model(PolicySpec(source=str(tmp_path / "policy")))
    assert all(map(torch.equal, found.parameters(), load_model(spec).parameters()))
    kept = json.loads((tmp_path / "policy" / file).read_text())
    if file == "generation_config.json":  # as it was
        assert given.items() <= kept.items()
    else:
        assert kept["pad_token_id"] != -1
        assert kept["bos_token_id"] != -1


def test_no_row_of_the_embedding_is_padding_if_the_settings_name_none(policy_with):
    """torch takes -1 for the last row, which then gets no gradient."""
    model = load_model(policy_with("config.json", {"pad_token_id": -1}))
    assert model.get_input_embeddings().padding_idx is None


def test_a_saved_policy_lists_every_token_that_ends_an_answer(policy_with, saver_of, tmp_path, monkeypatch):
    """So that whatever generates with it, or with its codes, stops where the run's engines did."""
    monkeypatch.setattr(module, "fleet_weight_max_code", lambda *_: 127)
    saver_of(policy_with("generation_config.json", {"eos_token_id": [5, 7]}), "export.quantized=int8").final()
    for folder in ("policy", "policy-int8"):
        kept = json.loads((tmp_path / folder / "generation_config.json").read_text())
        assert kept["eos_token_id"] == [1, 5, 7], folder


def test_settings_of_the_chat_template_travel_with_every_form_of_a_policy(saver_of, tiny_spec, tmp_path, monkeypatch):
    """But tools, which are a request's own."""
    monkeypatch.setattr(module, "fleet_weight_max_code", lambda *_: 127)
    args = "task.chat_template_args={enable_thinking: false, tools: [{name: f}]}"
    saver_of(tiny_spec, "task.system_prompt=Be brief.", args, "export.quantized=int8").final()
    expected = ChatSettings(system_prompt="Be brief.", variables={"enable_thinking": False})
    for folder in ("policy", "policy-int8"):
        spec = PolicySpec(source=str(tmp_path / folder), quantized=folder != "policy")
        assert kept_settings(load_tokenizer(spec)) == expected
    saver_of(PolicySpec(source=str(tmp_path / "policy"))).final()  # a run that has none
    assert kept_settings(load_tokenizer(PolicySpec(source=str(tmp_path / "policy")))) == ChatSettings()


class Gathered:
    """A sharded learner, whose parameters are there only until the next is asked for."""

    adapters = None

    def __init__(self, model):
        self._model, self.gathered = model, 0

    def named_parameters(self):
        for name, parameter in self._model.named_parameters():
            self.gathered += 1
            whole = parameter.detach().clone()
            yield name, whole
            whole.fill_(float("nan"))

    def factors(self):
        return {}


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_gather_all_parameters_whatever_rank_0_meets(tiny_spec, tmp_path, rank, small_files):
    model = load_model(tiny_spec)
    learner = Gathered(model)
    config = load_config(None, [f"output_dir={tmp_path}", "export.quantized=none"])
    saver = Saver(config, learner, tiny_spec, None, tmp_path, rank=rank)
    with pytest.raises(CheckpointError) if rank == 0 else nullcontext():
        saver.final()
    assert learner.gathered == len(list(model.parameters()))


def test_what_was_gathered_is_saved_before_it_is_gone(tiny_spec, tmp_path):
    model = load_model(tiny_spec)
    fold(model, 2.0)
    config = load_config(None, [f"output_dir={tmp_path}", "export.quantized=none", "quantization.uaq_scale=2"])
    Saver(config, Gathered(model), tiny_spec, None, tmp_path, rank=0).final()
    found = load_model(PolicySpec(source=str(tmp_path / "policy")))
    for written, expected in zip(found.parameters(), load_model(tiny_spec).parameters(), strict=True):
        assert torch.equal(written, expected)


def test_a_full_disk_is_said_and_the_checkpoint_before_is_left(saver, tmp_path, small_files):
    write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2 cannot be written to .*File too large"):
        saver.checkpoint(2, None)
    with pytest.raises(CheckpointError, match="the final policy cannot be written"):
        saver.final()
    found, rejected = latest(tmp_path)
    assert (found.step, rejected) == (1, [])
    assert not (tmp_path / "policy").exists()


def test_a_half_written_checkpoint_that_cannot_be_removed_does_not_stop_the_next(saver, tmp_path, monkeypatch):
    left = partial_folder(tmp_path, 2) / "learner"
    left.mkdir(parents=True)
    (left / ".nfs0001").write_text("open elsewhere")
    hold_open(monkeypatch, ".nfs0001")
    monkeypatch.setattr("qurl_ray.training.rank.saver.wait", lambda call, *_: call)
    saver.checkpoint(2, None)
    assert latest(tmp_path)[0].state() == {"step": 2}
