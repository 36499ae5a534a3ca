# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What ranks that share a sequence send each other, counted, and what that costs on machines that are not here."""
