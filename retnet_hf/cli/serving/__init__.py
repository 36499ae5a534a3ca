# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
