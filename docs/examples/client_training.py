"""A toy policy learns to say seven:  client_training.py URL sample  beside  client_training.py URL train."""

import os
import sys

import torch

from workers.client import Client
from workers.weights.pull import WeightPuller

STEPS, TOKENS, TARGET = 30, 10, 7


def sample(client: Client) -> None:
    client.put_prompts_data(["Say seven."] * STEPS)
    client.end_stream("x_rollout")
    prompts = client.create_stream_data_loader("x_rollout", ["x_prompt"], count=1)
    for step, _ in enumerate(prompts):
        manifest = client.wait_weights(newer_than=step - 1, timeout_s=60)
        with WeightPuller().pull(manifest) as tensors:
            policy = tensors["logits"].softmax(0)
        answers = [torch.multinomial(policy, length, replacement=True) for length in range(1, 33)]
        rewards = [(answer == TARGET).float() for answer in answers]
        client.put_experience_data({"x_answer": answers, "x_reward": rewards})
    client.end_stream("x_train")


def train(client: Client) -> None:
    logits = torch.zeros(TOKENS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.2)
    client.weight_sync_notify({"logits": logits.detach()}, version=0)
    stream = client.create_stream_data_loader("x_train", ["x_answer", "x_reward"], count=32)
    for step, (batch, index) in enumerate(stream):
        answers, rewards = batch["x_answer"].values, batch["x_reward"].values  # [all tokens], nothing padded
        advantages = rewards - rewards.mean()
        loss = -(logits.log_softmax(0)[answers] * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        client.weight_sync_notify({"logits": logits.detach()}, version=step + 1)
        client.clear(index)
        print(f"step {step}: mean reward {rewards.mean():.2f}")


with Client.connect(sys.argv[1], "toy", password=os.environ.get("STREAMRL_BROKER_PASSWORD", "")) as client:
    client.declare_task("x_rollout", ["x_prompt"])
    client.declare_task("x_train", ["x_answer", "x_reward"])
    {"sample": sample, "train": train}[sys.argv[2]](client)
