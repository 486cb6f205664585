"""GPUs serve a policy's codes through Ray's own app for vLLM: the example for Kubernetes, here on a CPU."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from qurl_ray.config.serving import ServingConfig
from qurl_ray.serving.load import load_policy
from tests.serving.apps import START_S, SUM, environment, free_port, save_run
from tests.serving.test_app import expected
from tests.training.runs import ROOT, kill_all

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

ON_A_CPU = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory, _quiet_machine):
    return save_run(tmp_path_factory.mktemp("runs"), "first", seed=1)


@pytest.fixture(scope="module")
def client(run, tmp_path_factory):
    """A client of the app of cluster/kuberay/serve.yaml."""
    service = yaml.safe_load((ROOT / "cluster/kuberay/serve.yaml").read_text())
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (llm,) = config["applications"][0]["args"]["llm_configs"]
    assert llm["model_loading_config"]["model_source"].endswith("/policy-int8")
    llm["model_loading_config"] = {"model_id": "first", "model_source": str(run / "policy-int8")}
    del llm["accelerator_type"]
    llm |= {"accelerator_config": {"kind": "cpu"}, "runtime_env": {"env_vars": ON_A_CPU}}
    llm["engine_kwargs"] |= {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8}
    folder = tmp_path_factory.mktemp("app")
    config["http_options"] = {"host": "127.0.0.1", "port": (port := free_port())}
    (folder / "serve.yaml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("serve"), "run", folder / "serve.yaml"],
            env=environment(RAY_OVERRIDE_RESOURCES='{"CPU": 4}') | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}/v1"

    def answers() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return httpx.get(f"{url}/models").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until = time.monotonic() + START_S
        while not answers():
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.5)
        yield openai.OpenAI(base_url=url, api_key=os.environ.get("QURL_API_KEY", "none"), timeout=120)
    finally:
        kill_all(process)


def test_it_answers_with_the_codes_that_the_run_has_exported(client, run):
    whole = client.chat.completions.create(model="first", messages=SUM, max_tokens=8, seed=1)
    assert whole.usage.completion_tokens > 0
    completion = client.completions.create(model="first", prompt="12+34=", temperature=0, max_tokens=1, logprobs=1)
    loaded = load_policy(run / "policy-int8", ServingConfig(slots=1))
    (token,) = expected(loaded, "12+34=", seed=1, temperature=0.0, max_new_tokens=1)
    assert completion.choices[0].text == loaded.tokenizer.decode([token])
