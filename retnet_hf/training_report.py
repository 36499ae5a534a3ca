# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a finished training run tells about itself: the loss curve and the model card."""

import logging
import math
from pathlib import Path


CURVE = "loss_curve.png"

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- retnet
- retnet_hf
- retention
---

# {name}

A RetNet language model of {parameters:,} parameters ({layers} layers, hidden size {hidden_size}, {heads} heads), trained
with `retnet-hf train`. It decodes recurrently, and what it remembers takes {state_bytes:,} bytes, however long the text.

## Training

| | |
|---|---|
| text | {sources} |
| tokens | {training_tokens:,} to train on, {evaluation_tokens:,} held out; vocabulary of {vocab_size:,} |
| steps | {steps:,} of {batch_size} × {block_size} tokens |
| learning rate | {lr:g}, weight decay {weight_decay:g}, seed {seed} |
| perplexity on the held-out text | **{after:.2f}** per token ({before:.2f} before training) |

![loss]({curve})

## Use

```python
import retnet_hf  # registers RetNet with transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}")
model = AutoModelForCausalLM.from_pretrained("{folder}")
inputs = tokenizer({prompt!r}, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100, do_sample=True)[0]))
```
"""


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def draw_loss_curve(log: list[dict[str, float]], file: Path) -> None:
    """Draws the losses of `TrainerState.log_history`, on training and on held-out text, as a PNG."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it announces that it builds its cache
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "held out", "o-")):
        points = [(entry["step"], entry[key]) for entry in log if key in entry]
        if points:
            axes.plot(*zip(*points), style, label=label, linewidth=1.5, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def model_card(**facts: str | int | float) -> str:
    """The README.md of a trained model."""
    return _CARD.format(curve=CURVE, **facts)
