"""What is shown and written of settings: no passwords, and private files where there is one."""

import stat

import pytest

from qurl_ray.config import RunConfig, load_config, resolve
from qurl_ray.config.load import describe
from qurl_ray.config.serving import ServingConfig, load_serving, resolve_serving
from qurl_ray.config.shown import (
    names_secret,
    reason,
    redacted,
    shortened,
    shown,
    shown_address,
    write_settings,
)
from qurl_ray.config.tracking import TrackingConfig, mlflow_address
from qurl_ray.errors import ConfigError

SECRET = "http://me:sesame@host:5000"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:sesame@host:5000/x", "http://…@host:5000/x"),
        ("http://sesame@host", "http://…@host"),
        ("postgresql+psycopg2://me:ses@me@db/mlflow", "postgresql+psycopg2://…@db/mlflow"),
        ("postgresql://me:ses/ame@db/mlflow", "postgresql://…@db/mlflow"),
        ("mysql://db/x?user=me&password=sesame&ssl=1", "mysql://db/x?user=me&password=…&ssl=1"),
        ("https://host/api?access_token=sesame#x", "https://host/api?access_token=…#x"),
        ("https://host/?API_KEY=sesame", "https://host/?API_KEY=…"),
        ("tried http://a:b@c and http://d:e@f, twice", "tried http://…@c and http://…@f, twice"),
    ],
)
def test_passwords_and_tokens_are_left_out(text, shown):
    assert redacted(text) == shown
    assert redacted(shown) == shown


@pytest.mark.parametrize(
    "text", ["hf://datasets/me/set@main/data.jsonl", "sqlite:////runs/mlflow.db", "models:/me@champion", "a@b", "a?b=c"]
)
def test_other_text_is_unchanged(text):
    assert redacted(text) == text


def test_long_text_is_cut_after_its_secrets_are_left_out():
    assert shortened("x" * 300) == "x" * 200 + "… (300 characters)"
    assert reason(ValueError("x" * 290 + SECRET)).startswith("ValueError: xxx")
    assert "sesame" not in reason(ValueError("x" * 270 + SECRET))
    assert reason(ValueError("two\n lines")) == "ValueError: two lines"


def test_settings_with_a_password_are_for_this_user_alone(tmp_path):
    for private, mode in ((True, 0o600), (False, 0o644)):
        (tmp_path / "file").touch(mode=0o644)
        write_settings(tmp_path / "file", "path: …", private=private)
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
        assert (tmp_path / "file").read_text(encoding="utf-8") == "path: …"


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("http://me:sesame@host:5000/x", "http://…@host:5000/x"),
        ("http://me:ses ame@host", "http://…@host"),
        ("http://me:ses/ame@host", "http://…@host"),
        ("http://sesame@host", "http://…@host"),
        ("https://host/api?access_token=sesame#x", "https://host/api?…"),
        ("https://host/api?pass%77ord=sesame", "https://host/api?…"),
        ("http://me:ses?ame@host", "http://…"),
        ("mssql+pyodbc:///?odbc_connect=DRIVER%3Dx%3BPWD%3Dsesame", "mssql+pyodbc:///?…"),
        ("postgresql://me:ses/a@me@db/mlflow", "postgresql://…@db/mlflow"),
        ("postgresql://db/x?user=me&password=se#same", "postgresql://db/x?…"),
        ("postgresql://db/x?password='ses\"ame'&ssl=1", "postgresql://db/x?…"),
        ("postgresql://db/x?password=ses@me", "postgresql://…"),
        ("sqlite:////x/mlflow.db?token=sesame", "sqlite:////x/mlflow.db?…"),
        ("me:sesame@host/x", "…@host/x"),
    ],
)
def test_an_address_of_mlflow_is_shown_without_what_may_be_its_password(address, told):
    assert shown_address(address) == told
    assert shown_address(told) == told
    assert TrackingConfig(mlflow_uri=address).model_dump()["mlflow_uri"] == told


@pytest.mark.parametrize(
    "address",
    [
        "http://host:5000/x@y",
        "http://[::1]:5000/x@y",
        "postgresql://db/x@y",
        "sqlite:////a@b/mlflow.db",
        "sqlite:////a/mlflow.db?timeout=5",
        "databricks://profile",
        "/runs/a@b:c@d",
    ],
)
def test_an_address_without_a_password_is_shown_whole(address):
    assert shown_address(address) == address
    assert shown({"tracking": {"mlflow_uri": address}}) == {"tracking": {"mlflow_uri": address}}


def test_settings_are_shown_without_values_whose_names_say_that_they_are_secret():
    secret = {"api_key": "sk", "apiKey": 7, "DB-PASSWORD": "x", "hf_token": "x", "secrets": {"a": "b"}, "pwd": ["x"]}
    plain = {"max_tokens": 5, "token_budget": "x", "api_key_env": "QURL_API_KEY", "secret": None, "use_token": True}
    told = shown({"task": {"params": secret | plain | {"url": SECRET, "all": [{"api_key": "sk"}, SECRET]}}})
    assert told["task"]["params"] == dict.fromkeys(secret, "…") | plain | {
        "url": "http://…@host:5000",
        "all": [{"api_key": "…"}, "http://…@host:5000"],
    }
    assert shown(told) == told


@pytest.mark.parametrize("section", [RunConfig, ServingConfig])
def test_no_setting_of_ours_has_the_name_of_a_secret(section):
    assert not [key for key, *_ in describe(section) if names_secret(key)]


@pytest.mark.parametrize("section", [TrackingConfig, ServingConfig])
def test_settings_hold_the_address_and_write_it_without_its_password(section):
    settings = section(mlflow_uri=SECRET)
    assert settings.mlflow_uri == SECRET
    assert settings.model_dump(mode="json")["mlflow_uri"] == "http://…@host:5000"
    assert settings.model_dump()["mlflow_uri"] == "http://…@host:5000"
    assert "sesame" not in repr(settings) + settings.model_dump_json()


@pytest.mark.parametrize(
    "override",
    [
        f"tracking.mlflow_uri=[{SECRET}]",
        f"tracking.mlflow_url={SECRET}",
        f"name={SECRET}",
        f"name {SECRET}",
        "task.params.api_key=[sesame",
        "tracking.mlflow_uri=me:sesame@host",
        "mlflow_uri=me:sesame@host",
    ],
)
def test_errors_hold_no_password(override):
    for load in (load_config, load_serving):
        with pytest.raises(ConfigError) as caught:
            load(None, [override])
        assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("address", ["nosuchhost", "nosuchhost:5000"])
def test_a_host_alone_is_no_address_of_mlflow(address):
    with pytest.raises(ConfigError, match=r"tracking\.mlflow_uri: is no address, such as http://HOST:5000, or sqlite"):
        load_config(None, [f"tracking.mlflow_uri={address}"])


@pytest.mark.parametrize("address", ["nosuchhost", "nosuchhost:5000"])
def test_an_address_of_mlflow_is_checked_wherever_it_comes_from(address, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="the URI of MLflow is no address, such as http://HOST:5000"):
        mlflow_address(address, tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    for use in (
        lambda: mlflow_address(None, tmp_path),
        lambda: resolve(RunConfig(), submitted=False),
        lambda: resolve_serving(ServingConfig()),
    ):
        with pytest.raises(ConfigError, match=r"\$MLFLOW_TRACKING_URI is no address, such as http://HOST:5000"):
            use()
    assert resolve(RunConfig(tracking=TrackingConfig(mlflow=False)), submitted=False).tracking.mlflow_uri is None


def test_mlflow_is_where_the_setting_says_then_the_variable_then_the_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert mlflow_address(None, tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    assert resolve(RunConfig(), submitted=False).tracking.mlflow_uri is None
    monkeypatch.setenv("MLFLOW_TRACKING_URI", SECRET)
    for given, address in ((None, SECRET), ("http://other", "http://other"), ("http://…@host:5000", SECRET)):
        assert mlflow_address(given, tmp_path) == address
        config = RunConfig(tracking=TrackingConfig(mlflow_uri=given))
        assert resolve(config, submitted=False).tracking.mlflow_uri == address


def test_an_address_without_its_password_says_how_to_give_it(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match=r"http://…@host:5000, was written without its password: set \$MLFLOW_TR"):
        mlflow_address("http://…@host:5000", tmp_path)
