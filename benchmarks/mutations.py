# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Changes one line of the sources at a time and runs the tests of its file. A mutant that passes shows a missing test.

    python -m benchmarks.mutations [--only NAME] [--processes 2]

Each mutant runs in a copy of the checkout, in about 20 seconds.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue


ROOT = Path(__file__).parents[1]

# For each file of retnet_hf, by name, and of other packages, by path: the tests of the file, and pairs of a line, which must
# occur once in the file, and its changed version.
MUTANTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "retention_forms": (
        "retention precision gradients encoder",
        [
            ("updated = decay * state + key", "updated = state + key"),
            ("return torch.float64 if any(", "return torch.float32 if any("),
            ("tensor.repeat_interleave(groups, dim=1)", "tensor.repeat(1, groups, 1, 1)"),
            ("else output.masked_fill(~mask[:, None, :, None], 0), state", "else output, state"),
            ("keep = keep.masked_fill(reset[:, :, None, None], 0)", "pass"),
            ("keep, write = keep.where(mask, 1), mask.to(keep.dtype)", "write = mask.to(keep.dtype)"),
            ("else output * decay.write, state", "else output, state"),
            ("seen & mask[:, None, :] & mask[:, :, None]", "seen & mask[:, :, None]"),
            ("(document[:, :, None] == document[:, None, :])", "(document[:, :, None] <= document[:, None, :])"),
            ("& mask[:, :-1].cumsum(-1).bool()).any()", "& False).any()"),
            ("self.powers((age - before)[..., None])", "self.powers(age[..., None])"),
            ("(document != document[..., -1:])", "(document != before)"),
            ("query = query.masked_fill((document != before)[:, None, ..., None], 0)", "pass"),
            ("        if ages.has_holes:", "        if False:"),
            ("part.unflatten(1, (heads, -1)).sum(2)", "part.unflatten(1, (heads, -1))[:, :, 0]"),
            ("order = order[::-1] if backwards else order", "pass"),
            ("with without_autocast(query.device.type):  # a backward", "with nullcontext():  # a backward"),
            ("key, output_gradient = key.masked_fill(absent, 0), output", "key, output_gradient = key, output"),
            ("block.product(scores.mT, gradient, onto=part)", "block.product(scores, gradient, onto=part)"),
            ("create_graph=True", "create_graph=False"),
            ("pad(reset[:, 1:], (0, 1), value=True)", "pad(reset[:, :-1], (0, 1), value=True)"),
            ("or query.shape[1] % key.shape[1]:", "or False:"),
            ("else itself.masked_fill(~mask[:, None, :, None], 0)", "else itself"),
        ],
    ),
    "layout": (
        "plan padding packing positions encoder compile_and_export devices absent_tokens",
        [
            ("reset = position < expected", "reset = position <= expected"),
            ("next_position = torch.where(last >= 0, there, start)", "next_position = there"),
            ("torch._foreach_add_(lengths, self.tokens)", "pass"),
            ("documents[:, 1:] != documents[:, :-1], (1, 0))", "documents[:, 1:] != documents[:, :-1], (0, 1))"),
            ("torch.where(last < 0, present.long()", "torch.where(last < 1, present.long()"),
            ("valid = offsets[0] == 0 and offsets[-1] == length", "valid = offsets[-1] == length"),
            ("first = min(width - length, int(past_length))", "first = width - length"),
            ("past_length.clamp(max=width - length) +", "past_length * 0 +"),
            ("document_ends(self.starts).flip(1)", "self.starts.flip(1)"),
            ("if isinstance(part, (list, tuple)):", "if isinstance(part, bytes):"),
            ("done = {id(each): moved(each, device) for each in part}", "done = {id(each): each for each in part}"),
            ("return position_ids[:1] if alike else position_ids", "return position_ids[:1]"),
        ],
    ),
    "operators": (
        "plan padding encoder devices",
        [
            ("- self_retention(query", "- 0 * self_retention(query"),
            ("if log_decays[earlier] is log_decay:", "if True:"),
            ("output.masked_fill(~self.present[:, None, :, None], 0), state", "output, state"),
            ("ahead(log_decay, layout.turned(), with_final=False)", "ahead(log_decay, layout, with_final=False)"),
        ],
    ),
    "retnet_hf/ops/plan": (
        "plan precision devices",
        [
            (
                "turned.to(query.dtype) if query.dtype in self.narrows",
                "turned.to(query.dtype) if query.dtype not in self.narrows",
            ),
        ],
    ),
    "retention_state": (
        "state state_algebra outputs assisted_decoding modeling training",
        [
            ("given = old if self.is_initialized else None", "given = old"),
            ("if self.borrowed or torch.is_grad_enabled()", "if torch.is_grad_enabled()"),
            ("return torch.is_inference_mode_enabled() or", "return True or"),
            ("given = given.clone() if plan.in_place or unsaved else given", "pass"),
            ("lambda tensor: tensor.detach().clone(), vars(self)", "lambda tensor: tensor.detach(), vars(self)"),
            ("self.cumulative_length.sub_(removed)", "pass"),
            ("position = call.next_position[:, kept - 1]", "position = call.next_position[:, -1]"),
            ("rows(call.next_position.expand(self.batch_size, -1))", "call.next_position.expand(self.batch_size, -1)"),
            ("tuple(rows(tensor) for tensor in self._recorded_from)", "self._recorded_from"),
            ("torch.stack([layer.cumulative_length.to(device) for layer in layers]).max()", "layers[0].cumulative_length"),
            ("if origin.state_fingerprint != config.state_fingerprint:", "if False:"),
            ("if may_differ and not is_of_same_weights(weights_mark(model), self.weights_mark):", "if False:"),
            ("is_same and all(first.fits(model)", "is_same or all(first.fits(model)"),
            ("past = cache if use_cache else borrowed(cache)", "past = cache"),
            ("self.recurrent_states = self.next_position = None  # releases", "pass  # releases"),
            ("if held.shape[1] != all_heads:", "if False:"),
            ("self._recorded, self.last_ids = [], None", "self._recorded = []"),
            ("if layer_idx in self._before:", "if False:"),
            ("layer.borrow(), True  # nothing is", "layer.borrow(), False  # nothing is"),
        ],
    ),
    "state_file": (
        "state state_algebra stream_state",
        [
            ("if tensor.shape != shapes[name] or tensor.dtype not in allowed:", "if False:"),
            ('if metadata.get("sha256") != _checksum(metadata, tensors):', "if False:"),
            ("os.replace(partial, path)", "partial.rename(path); 1 / 0"),
            ("if foreign := sorted(set(tensors) - set(expected)):", "if foreign := []:"),
        ],
    ),
    "attention_columns": (
        "hybrid",
        [
            ("near = count > last - window", "near = count >= last - window"),
            ("count = count + past.count[:, -1:]", "pass"),
            ("torch.where(self.present, self.document, -1 - self.document)", "self.document"),
            ("number - before <= tokens", "number <= tokens"),
            ("max(1, reach.window - 1)", "max(1, reach.window - 2)"),
            ("needed & read.present & (read", "needed & (read"),
            ("order[:, -near - reach.sinks :]", "order[:, -near:]"),
        ],
    ),
    "attention_sinks": (
        "hybrid",
        [
            ("keys.beginnings(1), columns, 0)", "keys.beginnings(2), columns, 0)"),
            ("next_position - first - distance)", "next_position - 1 - distance)"),
            ("torch.stack([~sinks, sinks]", "torch.stack([torch.ones_like(sinks), sinks]"),
            ("torch.stack([~sinks, sinks]", "torch.stack([~sinks, torch.ones_like(sinks)]"),
            (".clamp(min=0)", ""),
        ],
    ),
    "softmax_attention": (
        "hybrid",
        [
            ("self.next_position = self.position[:, -1].clone()", "pass"),
            ("columns.count[:, query, None] - window)", "columns.count[:, query, None] - window + 1)"),
            ("(window is None or length <= window)", "True"),
            ("wanted = sinks[:, :first] & (", "wanted = sinks[:, :first] | ("),
        ],
    ),
    "modeling_retnet": (
        "modeling outputs training state padding linearization linear_cross_entropy",
        [
            ("else self.retention_norm(hidden_states)\n\n", "else hidden_states\n\n"),
            ("hidden_states * self.config.embedding_multiplier", "hidden_states"),
            ("use_cache = cache is not None or self.config.use_cache", "use_cache = self.config.use_cache"),
            ("if skip_logits and labels is None:", "if False:"),
            ('kwargs.get("ignore_index", -100)', "0"),
        ],
    ),
    "decay_and_rotation": (
        "conversion_retnet",
        [("self.scaling = config.head_dim**-0.5", "self.scaling = 1.0")],
    ),
    "multi_scale_retention": (
        "multi_scale_retention stream_state",
        [
            ("if config.bidirectional and state is not None:", "if False:"),
            ("seq_idx=documents", "seq_idx=None"),
            ("device, mask, past=past", "device, None, past=past"),
            ("hidden_states.masked_fill(mask[..., None] == 0, 0)", "hidden_states"),
            ("state.require_weights(self, alone=True)", "pass"),
            ("if unknown := sorted(", "if unknown := [] and sorted("),
        ],
    ),
    "stream_state": (
        "stream_state",
        [
            ("if given is not None and given.shape != expected:", "if False:"),
            ("if state_rows not in (-1, expected[0]):", "if False:"),
            ("self.tail.masked_fill(rows.to(self.tail.device)[:, None, None], 0)", "self.tail"),
            (
                "if not all(holder.is_initialized for state in states",
                "if False and all(holder.is_initialized for state in states",
            ),
            ("if layer not in self.parts:", "if False:"),
        ],
    ),
    "causal_convolution": (
        "stream_state",
        [
            ("own.tail = joined[:, tokens:].clone()", "own.tail = joined[:, :-tokens].clone()"),
            ("present.long().argsort(dim=1, stable=True)", "present.long().argsort(dim=1, stable=True, descending=True)"),
            ("output = output[:, self.span :]", "output = output[:, : tokens]"),
        ],
    ),
    "conversion/fla": (
        "conversion_fla_hybrid",
        [
            ('"rope_theta": (10000.0, "attention_rope_theta")', '"rope_theta": (500000.0, "attention_rope_theta")'),
            ("if found.setdefault(name, value) != value:", "if False:"),
            ("if len(windows - {None}) > 1:", "if False:"),
        ],
    ),
    "conversion/ring": (
        "conversion_ling conversion_published",
        [('chosen = config.get("slope_offset", offset)', "chosen = -1")],
    ),
    "conversion/ling": (
        "conversion_ling conversion_published",
        [
            ("if layer and int(layer[1]) in further:", "if layer and int(layer[1]) >= layers:"),
            ("config.kv_lora_rank + config.qk_rope_head_dim)", "config.qk_rope_head_dim)"),
        ],
    ),
    "latent_attention": (
        "conversion_ling conversion_published",
        [
            ("if plan.is_flash:", "if False:"),
            ("scaling=sum(self.sizes) ** -0.5", "scaling=self.sizes[0] ** -0.5"),
            ("if type(linear) is nn.Linear and", "if True and"),
        ],
    ),
    "conversion/minicpm_sala": (
        "conversion_minicpm_sala conversion_published",
        [
            ('"rms_norm_eps": eps / branch**2', '"rms_norm_eps": eps'),
            ('"logits_scaling": hidden / (config', '"logits_scaling": 1 + 0 * hidden / (config'),
            ('sparse.get("dense_len", 8192) - 1', 'sparse.get("dense_len", 8192)'),
        ],
    ),
    "layers": (
        "modeling",
        [
            ("shrink = depth if module.on_value_path", "shrink = depth if not module.on_value_path"),
            ("init.constant_(module.weight, 3**-0.5)", "pass"),
        ],
    ),
    "gradients": (
        "gradients linear_cross_entropy",
        [
            ("torch.addcmul(grad, normed, share, value=-1)", "grad"),
            ("RotateFunction.apply(gradient, cos, -sin)", "RotateFunction.apply(gradient, cos, sin)"),
            ("gradient.copy_(probabilities.mul_(counted))", "gradient.copy_(probabilities)"),
            ("gradients[0] += logits_gradient @", "gradients[0] -= logits_gradient @"),
            ("grad_values = torch.empty_like(values) if ctx.needs_input_grad[0]", "grad_values = None if True"),
        ],
    ),
    "retention_triton": (
        "retention_triton",
        [
            ("distance, visible = tl.abs(distance), tokens[None, :] >= 0", "visible = tokens[None, :] >= 0"),
            ("(others if after_chunk else states)", "states"),
            ("adds = not BACKWARD or head % HEADS_OF_MATRIX == 0", "adds = head >= 0"),
            ("key_document == (document_before if BACKWARD else document_after)", "key_document >= 0"),
            ("around = (after, None) if before is None else (before, after)", "around = (after, None)"),
            ("exists = (row >= 0) & (row < rows)", "exists = row >= 0"),
            ("None if places is None else places.contiguous()", "places"),
            ("tl.where(factor == 0, 0.0,", "tl.where(factor < 0, 0.0,"),
        ],
    ),
    "packed_and_split_triton": (
        "retention_triton",
        [
            (" < group.count[:, None]", " >= 0"),
            ("kept = torch.exp(group.count[:, None, None, None] *", "kept = torch.exp(16 *"),
            ("decay.keep if begins is None else", "decay.keep if True else"),
            ("gradient, arrived(), backward=True)", "gradient, backward=True)"),
            ("scan_states(scan, key, value, before)", "scan_states(scan, key, value)"),
            ("with without_autocast(output_gradient.device.type):", "if True:"),
            ("log_decay, before, mask, reset, chunk_size)[0], final", "log_decay, None, mask, reset, chunk_size)[0], final"),
        ],
    ),
    "kernels": (
        "retention_triton",
        [(" and forward_ad._current_level < 0", "")],
    ),
    "rotation_triton": (
        "retention_triton",
        [
            ("        sine = -sine", "        pass"),
            ("0 if cos.shape[0] == 1 else cos.stride(0)", "0"),
            ("not ctx.back", "ctx.back"),
            ("given[0] != given[1] or given[2] != given[3] or ", ""),
            ("if size % 2 or key", "if key"),
            ("query, key = with_dense_rows(query), with_dense_rows(key)", "pass"),
            ("[turn.contiguous() for turn in (*of_query, *of_key)]", "[*of_query, *of_key]"),
            ("of_key = of_head - batches * H", "of_key = of_head"),
        ],
    ),
    "gates_triton": (
        "retention_triton",
        [
            ("gate * share, share * (1 + gate * (1 - share))", "gate * share, share"),
            ("(tl.sum(upstream * normed, axis=1) / V)[:, None]) * scale", "0.0) * scale"),
            ("total += upstream * normed", "total += upstream"),
            ("tl.sum(result * result, axis=1) / V + EPS", "tl.sum(result * result, axis=1) / V"),
            (
                "first = tl.arange(0, TILE), tl.program_id(0).to(tl.int64) * tiles_of_program * ROWS",
                "first = tl.arange(0, TILE), 0",
            ),
        ],
    ),
    "cross_entropy_triton": (
        "retention_triton",
        [
            ("result = tl.where(counted, result, 0.0)", "pass"),
            ("total = total * tl.exp(before - level) +", "total = total +"),
            ('other=float("nan")', "other=0.0"),
        ],
    ),
    "launching": (
        "launching",
        [
            ("tensor.data_ptr() % 16 == 0", "True"),
            ("(*tensors, *numbers, *constants)", "(*tensors, *numbers)"),
            ("numbers, *options.values(), *kinds)", "*options.values(), *kinds)"),
            ("launches.clear()\n        launches[use]", "launches[use]"),
        ],
    ),
    "kernel_check": (
        "kernels",
        [
            ("for _ in range(2):  #", "for _ in range(1):  #"),
            ("RIGHT.difference_update(", "list("),
        ],
    ),
    "retention_split": (
        "context_parallel",
        [
            ("starts[-1].masked_fill(begins[number], 0)", "starts[-1]"),
            ("follows = torch.where(latest[:, 0] >= 0,", "follows = torch.where(latest[:, 0] >= size,"),
        ],
    ),
    "retention_packed": (
        "packed_states",
        [
            ("key = key.masked_fill((place >= group.count[:, None])[:, None, :, None], 0)", "pass"),
            ("state.masked_fill_(begins[part, None, None, None], 0)", "pass"),
            ("[state for _, state in parts])[documents.order]", "[state for _, state in parts])"),
        ],
    ),
    "packed_documents": (
        "packed_states",
        [
            ("if len(set(named)) < documents or", "if"),
            ("((starts == 0) | (starts < past_position))", "(starts == 0)"),
            ("before.masked_fill(layout.begins[:, None, None, None], 0)", "before"),
        ],
    ),
    "configuration_hybrid": (
        "configuration",
        [
            ("softmax = range(layers - 1, 0, -SOFTMAX_EVERY)", "softmax = range(layers - 1, -1, -SOFTMAX_EVERY)"),
            ('if "layer_types" in overrides or ', "if "),
            (" and overrides.keys().isdisjoint(ROTATES_SOFTMAX)", ""),
        ],
    ),
    "modeling_hybrid": (
        "hybrid experts conversion_families",
        [
            (
                "self.mixer_multiplier = of_attention or config.residual_multiplier",
                "self.mixer_multiplier = config.residual_multiplier",
            ),
            ("if layer_idx in (config.learned_rotary_layers or ()):", "if False:"),
            ("return query, key, self.value_act(value)", "return query, key, value"),
            ("            without_weights(self.norm, self.embed_norm)", "            pass"),
            ("return plan.rotate.rescaled(scale, HALF_PRECISION)", "return plan.rotate"),
            ('if config.rotary_layers == "softmax_attention":', "if False:"),
        ],
    ),
    "travelling_code": (
        "remote_code",
        [
            ("            for needed in sorted(module.needs, key=order):", "            for needed in module.needs:"),
            ("    vars(saved)[name] = answer", "    pass"),
            ("elif is_relative and module in GPU:", "elif False:"),
            ("    if unseen:", "    if False:"),
        ],
    ),
    "configuration_checks": (
        "works_with_peft",
        [('list(ADAPTED) if hasattr(self, "vocab_size") else "all-linear"', '"all-linear"')],
    ),
    "conversion/family_model_types": (
        "conversion_ling",
        [('return "short_conv_kernel_size" in content', "return True"), ("        return True\n", "        return False\n")],
    ),
    "long_sequences": (
        "long_sequences",
        [
            ("tokens = -(-chunks // pieces) * chunk_size", "tokens = -(-chunks // pieces) * chunk_size - 1"),
            ("recorded = any(asked) or", "recorded ="),
        ],
    ),
    "generation_retnet": (
        "generation state",
        [
            ("attention_mask = torch.cat([attention_mask.new_ones(", "torch.cat([attention_mask.new_ones("),
            ("state.activate_past_recording()", "pass"),
        ],
    ),
    "cuda_graphs": (
        "cuda_graphs",
        [
            ("self.ids.copy_(input_ids)", "pass"),
            ("past.remember_last(input_ids)", "pass"),
            ("input_ids.shape[1] != 1 or not self.finds_memory()", "input_ids.shape[1] != 1"),
            ("if mask is not None and not bool(", "if False and not bool("),
            ("or layer.record_past or layer.borrowed", "or layer.borrowed"),
            ("if tensor.data_ptr() != pointer:", "if False:"),
            ("setattr(layer, name, tensor.copy_(now))", "pass"),
            ("del STEPS[id(state)]", "pass"),
            ("if module.training or", "if False or"),
            ("            self.given_up = True", "            pass"),
            ("has_hooks(modules)", "False"),
        ],
    ),
    "captured_steps": ("cuda_graphs", [("and is_plain(inputs)", "and True")]),
    "computed_buffers": (
        "positions precision",
        [
            ("round(angle / (2 * math.pi) * 2**64)", "round(angle / (2 * math.pi) * 2**40) * 2**24"),
            ("last = max(pairs - 1, 1) if config.rotary_endpoint else pairs", "last = pairs"),
        ],
    ),
    "streaming": (
        "streaming",
        [("        if not _is_within_epoch(state):", "        if False:")],
    ),
    "conversion/changes": (
        "conversion_families",
        [
            ("return list(tensors[0].tensor_split(self.parts))", "return list(tensors[0].tensor_split(self.parts))[::-1]"),
            (
                "unflatten(0, (self.heads, self.parts, -1)).unbind(1)]",
                "unflatten(0, (self.parts, self.heads, -1)).unbind(0)]",
            ),
            ("[first[0][:half], rest[0], first[0][half:], rest[1]]", "[first[0], rest[0], rest[1]]"),
        ],
    ),
    "conversion/dialect": (
        "conversion_families",
        [
            ("modules.append((theirs, ours))", "pass"),
            ("return Change() if turned == config.head_dim else", "return Change() if turned else"),
            (
                "Rows([heads * size, groups * size, groups * size], [turn, turn",
                "Rows([heads * size, groups * size, groups * size], [turn, Change()",
            ),
        ],
    ),
    "retnet_hf_cpu/compiled_layer": (
        "decoding_programs prompt_programs",
        [
            ("if not self.training and not needs_autograd():", "if not self.training:"),
            ("if not self.training and not needs_autograd()", "if not needs_autograd()"),
            ("if has_hooks(snapshot.within):", "if False:"),
            ("if not snapshot.is_unchanged():", "if False:"),
            ("self.programs, self.prompts = {}, None", "pass"),
            ("batch not in self.programs and any(self.programs.values())", "False"),
            ("if program.snapshot.is_unchanged():", "if True:"),
        ],
    ),
    "retnet_hf_cpu/programs": (
        "decoding_programs prompt_programs",
        [
            ("if write is not None or len(keep) > 1:", "if len(keep) > 1:"),
            ("if write is not None or len(keep) > 1:", "if write is not None:"),
            ("if past.record_past or not past.is_initialized", "if not past.is_initialized"),
            (" or not past.can_be_overwritten()", ""),
            ('past.can_be_overwritten() or torch.is_autocast_enabled("cpu")', "past.can_be_overwritten()"),
            ("hidden_states.shape[:-1] == (1, 1) and ", ""),
            ("or not hidden_states.is_contiguous()", ""),
            ("(rotate.turn is not rotate_step or self.dtype in rotate.narrows)", "False"),
            ("and state.shape == self.state_shape", ""),
            ("plan.layout.advance_(past.next_position, past.cumulative_length)", "pass"),
            ('"threads": torch.get_num_threads(),', ""),
            ("if has_hooks(layer.modules()):", "if False:"),
        ],
    ),
    "retnet_hf_cpu/prompts": (
        "prompt_programs",
        [
            ("torch.is_grad_enabled() or", ""),
            ('or torch.is_autocast_enabled("cpu")', ""),
            ("or hidden_states.dtype != self.dtype", ""),
            ("if isinstance(plan, MappedPlan):", "if False:"),
            ("not self.rotates or", "self.rotates or"),
            ("plan.rotate.turn is rotate and", ""),
            ("and self.dtype not in plan.rotate.narrows", ""),
            ("if is_dense(layer) else None for layer", "if True else None for layer"),
            ("tensor[0].unflatten(0, (batch, -1))", "tensor[0].unflatten(0, (-1, batch)).transpose(0, 1)"),
        ],
    ),
    "conversion/moves": (
        "conversion_retnet conversion_writers conversion_families",
        [
            ("if filled[name] == 0:", "if False:"),
            ("if filled[name] > 1:", "if False:"),
            ("if unknown := [name for name in move.targets if name not in expected]:", "if unknown := []:"),
            ("if tuple(shapes[name]) != tuple(tensor.shape):", "if False:"),
            ("if name not in names:", "if False:"),
            ("if times[name] > 1:", "if False:"),
            ("if name not in times:", "if False:"),
            ("                _require_numbers(name, tensor)", "                pass"),
            ("or tensor.is_complex()", "or False"),
            ("or (tensor.is_floating_point() and tensor.itemsize < 2)", "or False"),
            ("and not tensor.isfinite().all():", "and False:"),
            ("if tensor.is_floating_point() != expected[name].is_floating_point():", "if False:"),
            ("model.tie_weights()", "pass"),
            ("if left := saved_tensors(model).keys() -", "if left := set() and saved_tensors(model).keys() -"),
            ("again.check(shapes)", "pass"),
            ("if value != allowed:", "if False:"),
            ("if differing:  # another field", "if False:  # another field"),
            ('parts = parts[:2] if joint == "gate_up_proj" else parts[2:]', "parts = parts[:2]"),
            ("if name.endswith(others):", "if False:"),
        ],
    ),
    "conversion/family": (
        "conversion_family conversion_writers conversion_families conversion_minicpm_sala conversion_published",
        [
            ("if value not in self.values:", "if False:"),
            ("require_fields(ours, target_format, (name, *self.values.values()))", "pass"),
            ("if value is None and self.default is not None:", "if False:"),
            ("config.require_one_value(**self.fixed)", "pass"),
            ("config.require_all_read()", "pass"),
            ('(config.get("head_dim") or hidden // heads) / hidden', "(hidden // heads) / hidden"),
            ("named = self.named_apart and any(", "named = any("),
            ("not self.by_architecture or self.architecture in", "True or self.architecture in"),
            ('if ours.tie_word_embeddings and "lm_head.weight" in (shapes or ())', 'if "lm_head.weight" in (shapes or ())'),
            ("if not ours.is_hybrid:", "if False:"),
            ("groups = ours.attention_num_key_value_heads or ours.num_key_value_heads", "groups = ours.num_key_value_heads"),
        ],
    ),
    "retnet_hf_cli/training/run_folder": (
        "cli cli_interrupted cli_safety",
        [
            ("if resume and overwrite:", "if False:"),
            (
                "if self.partial.exists() and any(self.partial.iterdir()) and not (self.partial / RECORD).exists():",
                "if False:",
            ),
            ("if not self.occupied and not self.partial.exists():", "if False:"),
            ("require_replaceable(folder)", "pass"),
            ("require_apart(folder, (Path(source) for source in sources if source is not None))", "pass"),
            ("key=step_of, reverse=True)", "key=step_of)"),
            ("_check(checkpoint)\n", "pass\n"),
            ("if command != self.command:", "if command is None:"),
            ("if self.partial.exists() and not overwrite:", "if False:"),
            (" or not randoms", ""),
        ],
    ),
    "retnet_hf_cli/training/schedule": (
        "cli cli_interrupted",
        [
            ("return min(1.0, max(step / self.steps, by_clock))", "return min(1.0, step / self.steps)"),
            ("elif over > state.global_step / self.course.steps:", "elif False:"),
            ("if not all(math.isfinite(", "if False and not all(math.isfinite("),
            ("highest * min(factor(step), factor(step_by_clock))", "highest * factor(step)"),
            ("control.should_training_stop = False, True, True", "control.should_training_stop = False, False, True"),
            ("signal.signal(other, handler)", "pass"),
        ],
    ),
    "retnet_hf_cli/training/start": (
        "cli",
        [
            ("if before != now:", "if False:"),
            ('if self.record.get("data") != self.digest:', "if False:"),
            ('return self.record["steps"]', "return 1"),
            ("torch.set_num_threads(threads)", "pass"),
        ],
    ),
    "retnet_hf_cli/training/run": (
        "cli cli_interrupted cli_tools",
        [
            ("replace(self.folder.output, self.folder.partial)", "pass"),
            ('or "can\'t allocate memory" in str(error)', ""),
            ("if not isinstance(fields, dict):", "if False:"),
            ('if fields.get("model_type", config_class.model_type) != config_class.model_type:', "if False:"),
            ("self.folder.discard()", "pass"),
            ('"eval_on_start": self.checkpoint is None,', '"eval_on_start": True,'),
            ("is_published and self.steps_done >= self.course.steps", "is_published"),
        ],
    ),
    "retention_2d": (
        "retention_2d",
        [
            ("(place[:, None] - place).abs()", "(place[:, None] - place)"),
            ("onwards = place if backwards else place.flip(0)", "onwards = place.flip(0)"),
            ("outputs[n] = torch.addcmul(outputs[n], entering, edge)", "pass"),
            ("step = torch.exp(log_decay * size)\n", "step = torch.exp(log_decay)\n"),
            ("key.masked_fill(~mask[:, None, :, :, None], 0)", "key"),
            ("read = before.expand_as(state) if upwards else state", "read = state"),
            ("output[n] = part[n] @ (reaching.mT if transposed else reaching)", "output[n] = part[n] @ reaching"),
            ("(False, True) if chunks > 1 else ()", "(False,) if chunks > 1 else ()"),
            ("own = needed and not needs_autograd(log_decay)", "own = needed"),
            ("readers = [(value, True), (key, False)]", "readers = [(key, True), (key, False)]"),
            ("if torch.compiler.is_compiling() and not (", "if False and not ("),
        ],
    ),
    "vision_blocks": (
        "vision_blocks vision_promises",
        [
            ("branch, self.scale)", "branch, torch.ones_like(self.scale))"),
            ("(kept / keep_rate).to(branch.dtype)", "kept.to(branch.dtype)"),
            ("one_per_image = (branch.shape[0],) +", "one_per_image = (1,) +"),
            ("last * next(blocks) / last_block", "last * next(blocks) / (last_block + 1)"),
            ("if pixel_values.dim() != 4 or pixel_values.shape[1] != num_channels:", "if pixel_values.dim() != 4:"),
            ("if 0 in pixel_values.shape:", "if False:"),
            ("pixel_values.to(next(self.stem.parameters()).dtype)", "pixel_values"),
            ("if each[0] in self.out_features", "if True"),
            ("accepts_loss_kwargs = False", "accepts_loss_kwargs = True"),
        ],
    ),
    "modeling_vir": (
        "vir vision_promises",
        [
            ("and last_row == rows:", ":"),
            ("[first_row:last_row], table.to(dtype))", ", table.to(dtype))"),
            ("torch.cat([hidden_states, hidden_states.flip(1)], dim=1)", "torch.cat([hidden_states, hidden_states], dim=1)"),
            ("self.mask_token.to(patches.dtype), patches)", "patches, self.mask_token.to(patches.dtype))"),
            ("if batch is not None and len(band) != batch:", "if False:"),
            ("if band.shape[3] != width or top + band.shape[2] > height:", "if False:"),
            ("if top < height:", "if False:"),
            ("averaged = self._averaged(hidden_states) if top == 0 else hidden_states", "averaged = hidden_states"),
            ("if not interpolate_pos_encoding and image_shape != self.config.image_shape:", "if False:"),
            (
                "if self.config.bidirectional or self.config.mirror_sequence:\n            raise",
                "if False:\n            raise",
            ),
            ("first_row=top // patch_height", "first_row=0"),
            ("(projected if self.bias is None else projected + self.bias)", "projected"),
        ],
    ),
    "image_processing_retention": (
        "image_processing",
        [
            ('image.dtype.newbyteorder("=")', "image.dtype"),
            ("channels not in (1, 3, 4)", "False"),
            (".round().clamp(0, 255)", ""),
            ("(levels[3:] / white) + white", "(levels[3:] / white)"),
            ("crop_pct is not None and not 0 < crop_pct <= 1", "False"),
            ("if height * target_width <= width * target_height:", "if True:"),
            ("if image.dtype == np.uint8:", "if True:"),
            ('(255 if picture.mode == "F" else 1 / 257)', "(1 / 257)"),
        ],
    ),
    "linearization/transfer": (
        "linearization",
        [
            ("ranks = distance.argsort(stable=True).argsort(stable=True)", "ranks = distance.argsort(stable=True)"),
            ("if window is not None and softmax.sliding_window is not None:", "if False:"),
            ("if unknown := sorted(set(kept) - set(layers)):", "if unknown := []:"),
            ("factor = 2 * factor", "pass"),
            ("else measures.rms[layer]", "else measures.rms[0]"),
            ("if not config.tie_word_embeddings:", "if False:"),
            ("copy.deepcopy(source.generation_config)", "source.generation_config"),
            ("parameter._is_hf_initialized = True", "pass"),
            ("retention.g_proj.weight.zero_()", "pass"),
        ],
    ),
    "linearization/measures": (
        "linearization_report",
        [
            ("if loss < 700 else math.inf", ""),
            ("(int(ids.max()) + 1)", "int(ids.max())"),
            ("mean_of(~repeated)", "mean_of(repeated)"),
            ("[loss[:, first:last].mean()", "[loss[:, first:].mean()"),
            ("return total / ids.numel()", "return total"),
            ("max(most_tokens, length)", "length"),
        ],
    ),
    "linearization/kept_layers": (
        "linearization linearization_report",
        [
            ("min(layers - 1, max(1, round(share * layers)))", "max(1, round(share * layers))"),
            ("key=costs.__getitem__, reverse=True)", "key=costs.__getitem__)"),
            ("window = max(1, min(window, blocks.shape[1] // 8))", "pass"),
            ("+ without_any - torch.tensor(with_one)) / 2", ") / 2"),
        ],
    ),
    "linearization/reach_of_heads": (
        "linearization",
        [
            ("(place * weights.sum(-1) - weights @ place)", "(weights @ place)"),
            ("(squares / tokens).sqrt()", "squares / tokens"),
            ("source.set_attn_implementation(implementation)", "pass"),
            ("source.train(training)", "pass"),
            ("if not tokens:", "if False:"),
        ],
    ),
    "linearization/recall": (
        "linearization_report",
        [
            ("if min(len(keys), len(values)) < pairs:", "if False:"),
            ("labels[:, 2 * pairs :: 2] = both_values[:, pairs:]", "labels[:, ::2] = both_values"),
            ("masked_fill(choices[rows] == right[rows, :, None], -torch.inf)", "clone()"),
            ("[..., 0] > others.amax(-1)", "[..., 0] >= others.amax(-1)"),
        ],
    ),
    "state_fingerprint": ("state_algebra configuration", [("*WITHOUT_EFFECT)]", '"rms_norm_eps")]')]),
}


def module_path(name: str) -> str:
    """Returns the path of a module of retnet_hf without its suffix."""
    [path] = (ROOT / "retnet_hf").rglob(f"{name}.py")
    return path.relative_to(ROOT).with_suffix("").as_posix()


def mutants(only: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yields file, tests, line and changed line of each mutant."""
    for file, (tests, pairs) in MUTANTS.items():
        for line, broken in pairs:
            if only in f"{file}: {line}":
                yield f"{file if '/' in file else module_path(file)}.py", tests, line, broken


def file_of_tests(name: str, checkout: Path = ROOT) -> Path:
    """Returns the file of tests with this name in `tests` or `tests_around`. StopIteration: there is none."""
    return next(checkout.glob(f"tests*/*/test_{name}.py"))


def is_killed(checkout: Path, file: str, tests: str, line: str, broken: str) -> bool:
    """Returns whether a test fails in the checkout with the changed line. Restores the file."""
    source = (checkout / file).read_text(encoding="utf-8")
    (checkout / file).write_text(source.replace(line, broken), encoding="utf-8")
    names = [str(file_of_tests(name, checkout)) for name in tests.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *names]
    paths = os.pathsep.join(map(str, (checkout, checkout / "installed")))
    try:
        return (
            subprocess.run(command, cwd=checkout, env=os.environ | {"PYTHONPATH": paths}, capture_output=True).returncode
            != 0
        )
    finally:
        (checkout / file).write_text(source, encoding="utf-8")


def copied(folder: Path) -> Path:
    """Copies the files that git tracks into a folder, links packages under their installed names, and returns the folder."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "installed").mkdir()
    for name in ("conversion", "linearization"):
        (folder / "installed" / f"retnet_hf_{name}").symlink_to(folder / name)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose file or line contains this")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    chosen = list(mutants(arguments.only))
    with tempfile.TemporaryDirectory() as folder:
        free: Queue[Path] = Queue()
        for number in range(arguments.processes):
            free.put(copied(Path(folder) / str(number)))

        def run(mutant: tuple[str, str, str, str]) -> bool:
            checkout = free.get()
            try:
                killed = is_killed(checkout, *mutant)
            finally:
                free.put(checkout)
            print("killed  " if killed else "passed  ", mutant[0], repr(mutant[2]), flush=True)
            return killed

        with ThreadPoolExecutor(arguments.processes) as pool:
            whole = sorted({(file, tests, "", "") for file, tests, *_ in chosen})
            if any(list(pool.map(run, whole))):
                sys.exit("tests fail without a mutation: nothing can be said")
            killed = sum(pool.map(run, chosen))
    print(f"{killed} of {len(chosen)} killed")


if __name__ == "__main__":
    main()
