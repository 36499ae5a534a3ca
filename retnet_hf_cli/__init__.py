# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The command `retnet-hf`. The library does not need it; it imports the library only when a command runs."""
