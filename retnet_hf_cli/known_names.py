# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Names that the configurations and `retnet_hf_conversion.formats` define, for a command that has not imported them yet.

A test holds them to those.
"""

PRESETS = (
    "tiny", "mini", "small", "base", "1.3B", "2.7B", "6.7B",
    "torchscale-base", "torchscale-medium", "torchscale-xl",
    "torchscale-3b", "torchscale-7b", "torchscale-13b", "torchscale-65b",
)  # fmt: skip
IMAGE_PRESETS = {
    "vir": (
        "micro", "mini", "tiny-16", "small-16", "base-16", "large-16", "large-14", "pulfer-tiny-14", "pulfer-base-14",
        "ViR-T/16", "ViR-S/16", "ViR-B/16", "ViR-L/16", "ViR-L/14",
    ),
    "rmt": (
        "micro", "mini", "tiny", "small", "base", "large", "small-token-label", "base-token-label", "large-token-label",
        "T", "S", "B", "L", "S*", "B*", "L*",
    ),
    "metaformer": ("micro", "mini", "s12", "s24", "s36", "m36", "m48"),
    "vit": ("micro", "mini"),
}  # fmt: skip
FORMATS = ("vir_official", "vir_pulfer", "rmt", "poolformer", "fla", "torchscale", "syncdoth", "yet_another_retnet")
DECAY_SCHEDULES = ("power_of_two", "log_linear", "alibi", "geometric", "none")
