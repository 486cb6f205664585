"""Settings and tokenizers that describe no model, or fit no model: one ConfigError each."""

import json
import random

import pytest
from transformers import LlamaConfig

from qurl_ray.errors import ConfigError
from qurl_ray.policy.load import context_length, empty_model, load_model, load_tokenizer, outline, stop_ids
from qurl_ray.policy.save import save_policy
from qurl_ray.policy.tiny import make_tokenizer
from qurl_ray.types import PolicySpec


@pytest.fixture
def folder(tmp_path, model, tokenizer):
    save_policy(model, tokenizer, tmp_path / "policy")
    return tmp_path / "policy"


def use_all(folder):
    """What a run does with a policy, without its weights at first."""
    spec = PolicySpec(source=str(folder))
    context_length(spec)
    stop_ids(spec, load_tokenizer(spec))
    load_model(spec)


def settings(folder, **changed):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_act": "gelu_fancy"}, "the activation function 'gelu_fancy' is not known to transformers"),
        ({"hidden_size": 0}, "hidden_size is 0, expected a whole number above 0"),
        ({"vocab_size": -18}, "vocab_size is -18, expected a whole number above 0"),
        ({"hidden_size": "wide"}, "Validation error for field 'hidden_size'.* 'wide'"),
        ({"hidden_size": None}, "hidden_size"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "hidden_size=128 is no multiple of num_attention_heads=3",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"num_attention_heads": 8}, "of another shape"),
        ({"hidden_size": 256}, r"of another shape \(model.embed_tokens.weight \[18, 128\], expected \[18, 256\]"),
        ({"vocab_size": 40}, r"model.embed_tokens.weight \[18, 128\], expected \[40, 128\]"),
        (
            {"num_hidden_layers": 1000, "layer_types": None},
            "num_hidden_layers is 1000, and the files hold 26 tensors",
        ),
        ({"eos_token_id": 18}, "eos_token_id is 18, and vocab_size is 18"),
        ({"eos_token_id": [1, 99]}, r"eos_token_id is \[1, 99\], and vocab_size is 18"),
        ({"pad_token_id": 18}, "pad_token_id is 18"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"model_type": "qwen99"}, "qwen99"),
        ({"model_type": ["qwen2"]}, "TypeError: unhashable type"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "model"),
        ({"dtype": "float99"}, "float99"),
    ],
)
def test_settings_that_describe_no_such_model_are_an_error(folder, changed, message):
    use_all(folder)
    settings(folder, **changed)
    with pytest.raises(ConfigError, match=message) as error:
        use_all(folder)
    assert str(folder) in str(error.value)


def test_a_missing_kind_of_padding_is_no_error(folder):
    settings(folder, pad_token_id=-1, bos_token_id=None)
    use_all(folder)


CHATML = "{% for m in messages %}<im_start>{{ m.role }}\n{{ m.content }}<im_end>\n{% endfor %}"
ENDS = {
    "chatml": (CHATML, "<im_end>"),
    "after a blank, as Llama 2's": (
        "{% for m in messages %}[{{ m.role }}] {{ m.content + ' <eot>' }}{% endfor %}",
        "<eot>",
    ),
    "only between turns, as GLM's": ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<user>"),
    "the longest": ("{% for m in messages %}{{ m.content }}<eot>2{% endfor %}", "<eot>2"),
    "the end token": ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", "<eos>"),
    "text": ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
    "no word of the assistant": ("{% for m in messages if m.role == 'user' %}{{ m.content }}<eot>{% endfor %}", None),
    "fails": ("{{ raise_exception('one turn only') }}", None),
    "none": (None, None),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_token_that_the_template_writes_after_a_turn_ends_an_answer(tmp_path, name):
    template, end = ENDS[name]
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<im_start>", "<im_end>", "<eot>2", "<eot>", "<user>", "<assistant>"])
    tokenizer.chat_template = template
    LlamaConfig(vocab_size=32, max_position_embeddings=64, eos_token_id=1).save_pretrained(tmp_path)
    ids = {1} | ({tokenizer.convert_tokens_to_ids(end)} if end else set())
    assert set(stop_ids(PolicySpec(source=str(tmp_path)), tokenizer)) == ids


def test_ends_are_those_of_all_files_together(folder, tokenizer):
    """Each of config.json, generation_config.json and the tokenizer has one that the others lack, and a -1."""
    settings(folder, eos_token_id=[3, -1])
    for listed, ids in (([5, 7, -1], (1, 3, 5, 7)), (9, (1, 3, 9)), (-1, (1, 3)), (None, (1, 3)), ([], (1, 3))):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
        spec = PolicySpec(source=str(folder))
        assert stop_ids(spec, tokenizer) == ids
        assert outline(spec).stop_ids == ids
    (folder / "generation_config.json").unlink()
    assert stop_ids(PolicySpec(source=str(folder)), tokenizer) == (1, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"eos_token_id": [1, 99]}', r"eos_token_id of generation_config.json is \[1, 99\], and vocab_size is 18"),
        ('{"eos_token_id": "2"}', "eos_token_id of generation_config.json is '2'"),
        ('{"eos_token_id": true}', "eos_token_id of generation_config.json is True"),
        ("{", "generation_config.json"),
    ],
)
def test_settings_of_generation_that_name_no_end_are_an_error(folder, text, message):
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        use_all(folder)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe\x00", b"{}", b'"x"', b"[" * 100_000])
def test_what_is_no_settings_at_all_is_an_error(folder, text):
    (folder / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"policy' cannot be loaded: .+"):
        use_all(folder)


ODD = (None, 0, -1, 3, 2**70, 1.5, float("nan"), "x", "", [], {}, [1], ["a"], {"a": 1}, True, False)


def test_whatever_the_settings_say_there_is_a_model_or_a_config_error(folder):
    """Seeded; each of some hundred changes replaces or removes one or two settings."""
    whole = json.loads((folder / "config.json").read_text())
    draw, errors = random.Random(0), 0
    for _ in range(300):
        changed = dict(whole)
        for key in draw.sample(list(whole), draw.choice((1, 1, 2))):
            changed[key] = draw.choice(ODD)
            if draw.random() < 0.2:
                del changed[key]
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            spec = PolicySpec(source=str(folder))
            context_length(spec)
            empty_model(spec)
        except ConfigError:
            errors += 1
    assert errors > 100


def tokens(change):
    """Change tokenizer.json."""

    def apply(folder):
        file = folder / "tokenizer.json"
        whole = json.loads(file.read_text())
        change(whole)
        file.write_text(json.dumps(whole))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (tokens(lambda whole: whole["model"]["vocab"].clear()), "the tokenizer is empty"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "the tokenizer is empty"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"model": 3}'), "cannot be loaded"),
        (lambda folder: (folder / "tokenizer_config.json").write_bytes(b"\xff"), "cannot be loaded"),
        (
            tokens(lambda whole: whole["model"]["vocab"].update(new=18)),
            "gives 'new' the id 18, and the embedding has 18",
        ),
        (tokens(lambda whole: whole["model"]["vocab"].update({"9": 1000})), "gives '9' the id 1000"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_an_error(folder, damage, message):
    damage(folder)
    with pytest.raises(ConfigError, match=message) as error:
        load_tokenizer(PolicySpec(source=str(folder)))
    assert str(folder) in str(error.value)


def test_added_tokens_need_rows_of_the_embedding(folder):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match="gives '<think>' the id 18, and the embedding has 18 rows"):
        use_all(folder)
