"""TRL's side of peers.py, in an environment of its own (`make peers`). It imports nothing of this project.

    .venv-peers/bin/python benchmarks/peers_trl.py train|generate SETTINGS.json

`train` runs GRPOTrainer on problems of the file, and prints one JSON line: seconds of each step, and (step, seconds of
training so far, accuracy) of each evaluation. `generate` runs transformers' continuous batching: for each line of its
input it generates answers to the file's prompts, and prints their number of tokens.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Callback that records the seconds of each step; evaluations do not count."""

    def __init__(self, settings: dict, tokenizer) -> None:
        self.seconds, self.evaluations = [], []
        self._settings, self._tokenizer, self._since = settings, tokenizer, 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **kwargs) -> None:
        self.seconds.append(time.perf_counter() - self._since)
        every = self._settings.get("evaluate_every")
        if every and state.global_step % every == 0:
            accuracy = greedy_accuracy(model, self._tokenizer, self._settings["held_out"])
            self.evaluations.append((state.global_step, sum(self.seconds), accuracy))
            control.should_training_stop |= accuracy >= self._settings["target"]


def train(settings: dict) -> None:
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    clock = Clock(settings, tokenizer)
    fixed = {"min_new_tokens": settings["new_tokens"]} if settings["ignore_eos"] else {}
    updates, samples = settings["updates"], settings["samples"]
    config = GRPOConfig(
        output_dir=settings["folder"],
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
        gradient_checkpointing=False,
        max_steps=settings["steps"] * updates,
        per_device_train_batch_size=settings["prompts"] * samples // updates,
        steps_per_generation=updates,
        num_generations=samples,
        max_completion_length=settings["new_tokens"],
        temperature=1.0,
        top_k=0,
        generation_kwargs=fixed,
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        loss_type="bnpo",  # mean over an update's tokens, like ours; TRL's "dapo" divides by a generation's tokens
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        max_grad_norm=1.0,
        seed=settings["seed"],
        shuffle_dataset=False,
    )

    def exact(completions: list[str], answer: list[str], **_) -> list[float]:
        return [float(given.strip() == right) for given, right in zip(completions, answer, strict=True)]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_list(settings["problems"]),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    # one step of ours is one generation with all of its updates
    steps = [sum(clock.seconds[i : i + updates]) for i in range(0, len(clock.seconds), updates)]
    print(json.dumps({"seconds": steps, "evaluations": clock.evaluations}))


@torch.no_grad()
def greedy_accuracy(model, tokenizer, problems: list[dict]) -> float:
    model.eval()
    given = tokenizer([one["prompt"] for one in problems], return_tensors="pt", padding=True)
    made = model.generate(**given, max_new_tokens=8, do_sample=False)
    texts = tokenizer.batch_decode(made[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train()
    return statistics.mean(text.strip() == one["answer"] for text, one in zip(texts, problems, strict=True))


def generate(settings: dict) -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # output of libraries goes to stderr
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32).eval()
    config = GenerationConfig(
        max_new_tokens=settings["new_tokens"], do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    # By default it takes most of the machine's memory for keys and values, and minutes to fill it with zeros.
    cache = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=2048)
    for _ in sys.stdin:
        made = model.generate_batch(settings["prompts"], config, cache, progress_bar=False)
        print(sum(len(one.generated_tokens) for one in made.values()), file=answers, flush=True)


if __name__ == "__main__":
    command, path = sys.argv[1:]
    settings = json.loads(Path(path).read_text())
    torch.set_num_threads(settings["threads"])
    {"train": train, "generate": generate}[command](settings)
