"""Pages of --help: the list of settings and sections, and the settings that are named."""

import re

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner, Result

from qurl_ray.config.algorithm import TIS, Algorithm
from qurl_ray.config.cli import training_app
from qurl_ray.config.guard import GuardConfig
from qurl_ray.config.load import describe
from qurl_ray.config.rollout import RolloutConfig, VllmConfig
from qurl_ray.config.serving import ServingConfig, serving_app
from qurl_ray.config.task import DatasetTask, TaskBase

ABOUT = "Train with care: python jobs/careful.py --config a.yaml"
SECTIONS = [
    *(
        "model",
        "task",
        "rollout",
        "rollout.vllm",
        "environment",
        "quantization",
        "algorithm",
        "algorithm.correction",
        "learner",
        "learner.lora",
        "learner.lora.noise",
    ),
    *("guard", "sync", "tracking", "evaluation", "evaluation.certificate", "checkpoint", "export"),
]


def never(*_: object, **__: object) -> int:
    raise AssertionError("the job was run")


def invoke(*arguments: str, columns: int = 80, app=training_app) -> Result:
    made = app("dapo", never, ABOUT) if app is training_app else app(never, ABOUT)
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(made, arguments)


def page(*names: str, columns: int = 80, app=training_app) -> str:
    done = invoke("--help", *names, columns=columns, app=app)
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout


def settings(text: str) -> list[str]:
    """Keys of the settings whose help a page shows, in its order."""
    return re.findall(r"^([a-z][\w.]+) (?:= |\(required\)$)", text, re.MULTILINE)


def keys(model: type[BaseModel], prefix: str) -> set[str]:
    return {f"{prefix}{name}" for name in model.model_fields if name != "type"}


def listed(text: str, title: str) -> dict[str, str]:
    """The rows of a list of the overview: what is said about each name."""
    lines = text.split(f"\n{title}")[1].split("\n\n")[0].splitlines()[1:]
    return dict(line.split(maxsplit=1) for line in lines)


# --- --help alone ----------------------------------------------------------------------------------------------


def test_help_alone_says_what_the_command_does_then_an_example_then_the_options():
    text = page()
    assert text.startswith("Train with care.\n\nExample: python jobs/careful.py --config a.yaml\n\nUsage: ")
    options = text.split("Usage: ")[1]
    places = [
        options.index(part) for part in ("KEY=VALUE", "--config", "--dry-run", "--fresh", "-h, --help", "Sections")
    ]
    assert places == sorted(places)


def test_help_alone_lists_each_section_in_one_line_and_no_setting_of_it():
    text = page()
    found = listed(text, "Sections of settings")
    assert list(found) == SECTIONS
    assert found["rollout"] == "Rollout workers: the engines that generate answers"
    assert found["guard"].endswith(" …")
    assert " ".join((GuardConfig.__doc__ or "").split()).startswith(found["guard"].removesuffix(" …"))
    assert found["model"].startswith("Policy to be trained: `type` is tiny")
    assert "samples_per_prompt" not in text
    assert len(text.splitlines()) < 60


def test_help_alone_lists_the_settings_outside_of_sections():
    found = listed(page(), "Settings (KEY=VALUE)")
    assert list(found) == ["name", "seed", "steps", "output_dir", "precision_flow", "placement"]
    assert found["output_dir"] == "Folder that holds the run folders"


@pytest.mark.parametrize("app", [training_app, serving_app])
def test_what_help_proposes_works(app):
    proposed = [line.split()[1] for line in page(app=app).splitlines() if line.startswith("  --help ")]
    assert proposed == (["rollout", "rollout.quantization", "all"] if app is training_app else ["policy", "all"])
    lengths = [len(settings(page(name, app=app))) for name in proposed]
    assert lengths[-2] == 1
    assert lengths[-1] > 20


def test_h_is_help():
    assert invoke("-h").stdout == invoke("--help").stdout
    assert invoke("-h", "rollout").stdout == invoke("--help", "rollout").stdout


def test_a_wrong_option_points_to_help():
    done = invoke("--confg", "a.yaml")
    assert done.exit_code == 2
    assert "Try 'main --help' for help." in done.stderr


def test_help_reads_no_settings():
    """A command that cannot be run, because of its file for one, can still be explained."""
    assert "Sections of settings" in invoke("--config", "no/such.yaml", "--help").stdout


# --- what is named ---------------------------------------------------------------------------------------------


def test_a_section_shows_its_settings_and_those_of_sections_inside():
    text = page("rollout")
    assert set(settings(text)) == (keys(RolloutConfig, "rollout.") - {"rollout.vllm"}) | keys(
        VllmConfig, "rollout.vllm."
    )
    assert text.startswith("[rollout] Rollout workers: the engines that generate answers.\n")
    assert text.index("rollout.hedge_after") < text.index("[rollout.vllm]") < text.index("rollout.vllm.kv_cache_gb")


def test_a_setting_comes_with_its_default_and_its_whole_help():
    text = page("rollout")
    shown = text.split("\nrollout.slots = 512\n")[1].split("\n\n")[0]
    assert " ".join(shown.split()) == RolloutConfig.model_fields["slots"].description
    assert all(line.startswith("    ") for line in shown.splitlines())


def test_a_section_in_a_section_shows_its_own_settings():
    text = page("algorithm.correction")
    assert set(settings(text)) >= keys(TIS, "algorithm.correction.")
    assert all(key.startswith("algorithm.correction.") for key in settings(text))
    assert "[algorithm.correction.type=tis] Truncated importance sampling (FlashRL)." in text


def test_a_section_with_types_shows_each_type():
    text = page("algorithm")
    assert set(settings(text)) >= keys(Algorithm, "algorithm.") - {"algorithm.correction"}
    for label in ("dapo", "grpo", "ppo"):
        assert f"\n[algorithm.type={label}] " in text
    assert text.index("algorithm.kl_coef") < text.index("[algorithm.type=ppo]") < text.index("algorithm.value_clip")
    assert page("algorithm.type") == text


def test_a_type_shows_its_own_settings_and_where_the_others_are():
    text = page("task.type=dataset")
    assert set(settings(text)) == keys(DatasetTask, "task.") - keys(TaskBase, "task.")
    assert "\ntask.path (required)\n" in text
    assert text.endswith("\nSettings of every type: --help task\n")
    assert "every type" not in page("model.type=tiny")


def test_all_shows_every_setting():
    assert sorted(settings(page("all"))) == sorted(key for key, default, _ in describe() if default)
    assert settings(page("all", app=serving_app)) == list(ServingConfig.model_fields)


@pytest.mark.parametrize("name", ["rollout.slots", "rollout.slots=7"])
def test_a_setting_shows_itself_alone(name):
    assert settings(page(name)) == ["rollout.slots"]
    assert page(name).startswith("rollout.slots = 512\n    Number of answers")


def test_a_setting_outside_of_sections_and_one_of_the_server_can_be_shown():
    assert settings(page("steps")) == ["steps"]
    shown = " ".join(page("slots", app=serving_app).split())
    assert shown == "slots = 32 Answers that a replica generates at a time."


def test_a_setting_that_differs_between_types_is_shown_for_each():
    text = page("algorithm.clip_high")
    assert "algorithm.clip_high = 0.28  [algorithm.type=dapo]\n" in text
    assert "algorithm.clip_high = 0.2  [algorithm.type=grpo, algorithm.type=ppo]\n" in text
    assert settings(text) == ["algorithm.clip_high"] * 2


def test_several_names_are_shown_in_their_order():
    assert settings(page("steps", "rollout.slots", "name")) == ["steps", "rollout.slots", "name"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("rolout", "'rollout'"),
        ("rollout.slot", "'rollout.slots'"),
        ("slots", "'rollout.slots'"),
        ("Guard", "'guard'"),
        ("correction", "'algorithm.correction'"),
        ("model.type=tinny", "'model.type=tiny'"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest_names(name, nearest):
    done = invoke("--help", name)
    assert (done.exit_code, done.stdout) == (2, "")
    start = f"error: --help {name}: there is no such setting or section; did you mean {nearest}"
    assert done.stderr.startswith(start)
    assert done.stderr.count("\n") == 1


def test_an_unknown_name_like_no_other_points_to_the_list():
    assert invoke("--help", "zzzz").stderr.endswith("such setting or section; --help alone lists the sections\n")


# --- the terminal ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "widest"), [(60, 60), (80, 80), (100, 100), (300, 100)])
@pytest.mark.parametrize("name", [None, "all"])
@pytest.mark.parametrize("app", [training_app, serving_app])
def test_pages_are_as_wide_as_the_terminal_up_to_a_hundred_columns(columns, widest, name, app):
    """Here without the options, which typer's runner wraps at 80; tests/jobs has whole pages."""
    text = page(*filter(None, [name]), columns=columns, app=app).split("\nSettings (KEY=VALUE):")[-1]
    assert widest - 5 <= max(map(len, text.splitlines())) <= widest


def test_lines_do_not_end_within_a_word():
    words = {word for row in describe() for part in row for word in part.split()}
    shown = {word for line in page("all", columns=60).splitlines() for word in line.split()}
    assert [word for word in shown - words if not word.startswith("[") and word not in ("=", "(required)")] == []
