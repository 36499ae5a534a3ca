# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The command `retnet-hf`. The library does not need it; it imports the library only when a command runs."""
