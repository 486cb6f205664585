"""What a run is given before anything is started."""

from pathlib import Path

from qurl_ray.config import load_config
from qurl_ray.loop.driver.prepare import prepare, prepare_task


def test_a_model_of_a_relative_path_is_found_by_processes_in_other_folders(tiny_spec, tmp_path, monkeypatch):
    """Ray Train's workers, for one, run in a folder of their session."""
    folder = Path(tiny_spec.source)
    monkeypatch.chdir(folder.parent)
    settings = [
        "model.type=pretrained",
        f"model.path={folder.name}",
        "rollout.max_new_tokens=4",
        f"output_dir={tmp_path}",
    ]
    config = load_config(None, settings)
    assert prepare(config, prepare_task(config), lambda *_: None).spec.source == str(folder.resolve())
