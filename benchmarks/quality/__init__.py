# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Quality at equal parameters, equal tokens and one recipe: the tables of the RetNet paper, small enough to repeat."""
