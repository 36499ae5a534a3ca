"""Races and limits: each module prints ratios measured in one run, beside what the machine can do at all."""
