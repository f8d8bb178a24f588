"""A reward model to try the pipeline with, see docs/ppo.md: random:qwen3-tiny under a random head of one number.

.venv/bin/python docs/examples/tiny_reward_model.py DIRECTORY
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from workers.models import model_cache, prepare_model

target = Path(sys.argv[1])
base = prepare_model("random:qwen3-tiny", cache_dir=model_cache(os.environ))
shutil.copytree(base, target)  # its tokenizer and chat template
torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
torch.nn.init.normal_(model.score.weight)
model.save_pretrained(target)
