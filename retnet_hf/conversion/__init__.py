# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Conversion of checkpoints of other libraries and model families into models of retnet_hf, and back.

Each format has one file, which defines

    NAME                                name of the format on the command line
    DESCRIPTION                         origin of the format
    recognises(names, config)           whether tensors of these names, with this config.json (or None), have the format
    plan(shapes, config)                a `Conversion`, made from names and shapes before a value is read
    from_<format>(state_dict, config)   the model
    to_<format>(model)                  (state_dict, config) in the format; some formats lack it

Families of hybrids are tables, `FAMILY`. There, these functions are methods of the table.
"""
