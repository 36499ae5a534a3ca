# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Checkpoints of other libraries and model families, converted into models of retnet_hf and back.

One file per format. Each has

    NAME                                what the format is called on the command line
    DESCRIPTION                         whose it is
    recognises(names, config)           whether tensors of these names, with this config.json (or None), are of the format
    plan(shapes, config)                what becomes what, as a `Conversion`, before a value is read
    from_<format>(state_dict, config)   the model
    to_<format>(model)                  (state_dict, config) of the format again, for the language models

A family of hybrids by another name is a table, `FAMILY`, of which these are methods.
"""
