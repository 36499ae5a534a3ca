# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What goes to the Hub and comes from it: cards, registration with the Auto classes, foreign checkpoints."""
