# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A training run, whatever it is on: on disk, in time, on the terminal, in figures."""
