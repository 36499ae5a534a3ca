# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""From a transformer to a RetNet: exact where attention stays, measured where it does not."""

import copy
import math
import pickle
import weakref

import pytest
import torch
from small_models import close, random_ids, rounding
from transformer_sources import SIZES, SOURCES, divergence, source_of
from transformers import LlamaConfig, MixtralConfig, TrainingArguments

from retnet_hf import RetNetHybridConfig, RetNetHybridForCausalLM, linearization
from retnet_hf.linearization import StoredTeacher, align, measure_heads, softmax_config, store_teacher, transfer
from retnet_hf.linearization.distillation import DivergenceByRows, divergence_of_top
from retnet_hf.linearization.transfer import decays_by_distance


pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_with_all_layers_kept_the_model_is_the_same(name, tied):
    source = source_of(name, tie_word_embeddings=tied)
    model = transfer(source)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    ids = random_ids(2, 40)
    close(model(ids).logits, source(ids).logits, 40 * rounding(32))
    arguments = {"max_new_tokens": 200, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **arguments).equal(source.generate(ids, **arguments))
    model = transfer(source.bfloat16())  # stays of half precision
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    close(model(ids).logits.float(), source(ids).logits.float(), rounding(dtype=torch.bfloat16))


def test_layers_that_are_kept_compute_what_they_did():
    """The first layer's attention alone is replaced: with its output put in, the rest is the source."""
    source = source_of("Qwen2")
    model, ids, right = transfer(source, kept=[1]), random_ids(2, 20), []
    handle = source.model.layers[0].self_attn.register_forward_hook(lambda _, __, output: right.append(output[0]))
    expected = source(ids).logits
    handle.remove()
    assert not torch.allclose(model(ids).logits, expected, atol=1e-2)
    model.model.layers[0].retention.register_forward_hook(lambda _, __, output: (right[0], *output[1:]))
    close(model(ids).logits, expected, 40 * rounding(32))

    source, wanted, found = source_of("Mistral"), [], []
    model = transfer(source, kept=[0])
    source.model.layers[0].self_attn.register_forward_hook(lambda _, __, output: wanted.append(output[0]))
    model.model.layers[0].attention.register_forward_hook(lambda _, __, output: found.append(output[0]))
    source(ids), model(ids)
    close(found[0], wanted[0], 40 * rounding(32))


def test_windows_and_sinks_alone_take_the_place_of_attention():
    source = source_of("Llama 3")
    model, ids = transfer(source, kept=[1], window=64, sinks=2), random_ids(2, 40)
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    close(model(ids).logits, source(ids).logits, 40 * rounding(32))  # a window that hides nothing
    narrow = transfer(source, kept=[1], window=8, sinks=2)
    assert narrow(ids).logits[:, :8].allclose(source(ids).logits[:, :8], atol=1e-4)
    assert not narrow(ids).logits[:, 20:].allclose(source(ids).logits[:, 20:], atol=1e-2)
    assert narrow.config.attention_sink_distance is None
    near = transfer(source, kept=[1], window=8, sinks=2, sink_distance=12)
    close(near(ids).logits[:, :13], narrow(ids).logits[:, :13], 40 * rounding(32))
    assert not near(ids).logits[:, 20:].allclose(narrow(ids).logits[:, 20:], atol=1e-3)
    assert transfer(source, kept=[1], sinks=2, sink_distance=12).config.attention_sink_distance is None  # no window
    [error] = align(narrow, source, ids)
    assert error > 0
    linearization.prepare_for_alignment(narrow)
    trained = {name for name, weight in narrow.named_parameters() if weight.requires_grad}
    assert trained == {f"model.layers.0.attention.{name}_proj.weight" for name in "qkvo"}


def test_heads_are_measured_by_definition():
    source, blocks, inputs = source_of("Qwen2"), [random_ids(2, 12), random_ids(2, 12, seed=1)], []
    measures = measure_heads(source.train(), blocks)
    assert source.config._attn_implementation == "sdpa"
    assert source.training
    source.eval().set_attn_implementation("eager")
    for layer in source.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    maps = torch.stack([torch.stack(source(ids, output_attentions=True).attentions) for ids in blocks])  # (2, L, B, H, T, T)
    distances = (maps * (torch.arange(12)[:, None] - torch.arange(12))).sum(-1).mean(dim=(0, 2, 4))
    torch.testing.assert_close(measures.distance, distances.double(), rtol=1e-5, atol=1e-6)
    outputs = torch.stack(inputs).view(2, 2, 2, 12, 4, -1)  # blocks, layers, B, T, H, V
    torch.testing.assert_close(measures.rms, outputs.square().mean(dim=(0, 2, 3, 5)).sqrt().double(), rtol=1e-5, atol=1e-6)
    # rounded attention weights do not add up to 1, which tells the more the further a token is from the beginning
    source, ids = source_of("Llama 3"), [random_ids(2, 400)]
    expected = measure_heads(source, ids).distance
    torch.testing.assert_close(measure_heads(source.to(torch.bfloat16), ids).distance, expected, rtol=0.02, atol=0.05)


def test_the_fastest_decay_is_for_the_head_or_the_group_that_looks_back_least():
    heads, grouped = ([100.0, 2.0, 30.0], None, [512, 2, 32]), ([30.0, 2, 9, 9, 50, 40], 3, [32, 32, 2, 2, 512, 512])
    for distances, groups, expected in (heads, grouped):
        decays = decays_by_distance("geometric", torch.tensor(distances), (2, 512), groups)
        assert [-1 / math.log(decay) for decay in decays] == pytest.approx(expected)


@pytest.mark.parametrize("measured", [True, False])
def test_a_linearized_model_with_shared_states_is_smaller_by_the_size_of_a_group(measured):
    source, ids = source_of("Llama 3"), random_ids(2, 30)
    measures = measure_heads(source, [ids]) if measured else None
    shared, apart = (transfer(source, kept=[], measures=measures, **share) for share in ({"share_states": True}, {}))
    assert 2 * shared.config.state_size == apart.config.state_size
    for layer in range(2):
        first, second, third, fourth = shared.config.decays(layer)
        assert first == second != third == fourth
    assert shared(ids, use_cache=True).past_key_values.layers[0].recurrent_states.shape[1] == 2


def test_head_outputs_keep_their_size():
    """A neutral gate, and a projection multiplied by what the norm takes away."""
    source = source_of("Llama 3")
    measures = measure_heads(source, [random_ids(4, 40)])
    model, ids, outputs = transfer(source, kept=[], measures=measures), random_ids(4, 40), []
    for layer in model.model.layers:
        layer.retention.o_proj.register_forward_pre_hook(lambda _, arguments: outputs.append(arguments[0]))
    model(ids)
    for output, ours, theirs, rms in zip(outputs, model.model.layers, source.model.layers, measures.rms, strict=True):
        weights = [weight.unflatten(1, (4, -1)) for weight in (ours.retention.o_proj.weight, theirs.self_attn.o_proj.weight)]
        heads = output.unflatten(-1, (4, -1)).square().mean(dim=(0, 1, 3)).sqrt()
        close(heads * (weights[0] / weights[1])[0, :, 0], rms.float(), 1e-3)
    model.generation_config.temperature = 0.5
    assert source.generation_config.temperature != 0.5


def test_the_cost_of_a_layer_is_what_the_model_loses_by_its_window_as_the_first_and_as_the_last_one():
    source, blocks = source_of("Llama 3"), random_ids(2, 48)
    costs, softmax = linearization.layer_costs(source, blocks, window=5, sinks=2), transfer(source)

    def lost(*narrow: int) -> float:
        """The divergence of the model whose layers `narrow` have windows."""
        kinds = ["sliding_attention" if index in narrow else "full_attention" for index in range(2)]
        fields = {"layer_types": kinds, "sliding_window": 5 if narrow else None, "attention_sinks": 2 if narrow else 0}
        model = RetNetHybridForCausalLM(RetNetHybridConfig.from_dict(softmax.config.to_dict() | fields)).eval()
        model.load_state_dict(softmax.state_dict())
        losses = []
        for ids in (blocks, blocks[:, :24].repeat(1, 2)):
            wanted, found = softmax(ids).logits.log_softmax(-1), model(ids).logits.log_softmax(-1)
            losses.append((wanted.exp() * (wanted - found)).sum(-1).mean().item())
        return sum(losses) / 2

    assert costs[0] == pytest.approx((lost(0) + lost(0, 1) - lost(1)) / 2, rel=1e-3)
    assert costs[1] == pytest.approx((lost(1) + lost(0, 1) - lost(0)) / 2, rel=1e-3)
    assert all(cost > 1e-4 for cost in linearization.layer_costs(source, random_ids(2, 32)).values())  # of short texts


def test_layers_that_alignment_makes_worse_stay_as_they_were():
    source, blocks = source_of("Llama 3"), random_ids(4, 40)
    model = transfer(source, kept=[], window=8, sinks=1)
    before, weights = linearization.LayersBefore(model, source, blocks), copy.deepcopy(model.state_dict())
    for parameter in model.model.layers[1].attention.parameters():
        parameter.add_(0.5)
    assert before.restore(model) == [1]
    assert all(weight.equal(weights[name]) for name, weight in model.state_dict().items())
    assert before.restore(model) == []


ODD = LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
QUANTISED = LlamaConfig(**SIZES, quantization_config={"quant_method": "fp8"})
REFUSED = {
    "model_type 'mixtral' cannot be linearized. Supported are llama, mistral": lambda: softmax_config(MixtralConfig()),
    "attention_bias must be False for linearization": lambda: softmax_config(LlamaConfig(attention_bias=True)),
    "this llama model cannot be linearized: rope_parameters must be a dict with a rope_": lambda: softmax_config(ODD),
    r"the model's weights are quantised \(fp8\)": lambda: softmax_config(QUANTISED),
    "layer 7 cannot be kept: the model has layers 0 to 1": lambda: transfer(source_of("Llama 3"), kept=[0, 7]),
    "states cannot be shared: each key/value head of the model serves a single query head": lambda: transfer(
        source_of("Llama 3", num_key_value_heads=4), kept=[], share_states=True
    ),
    "the model already has windows of 16 tokens, and can have only one size": lambda: transfer(
        source_of("Mistral", sliding_window=16), kept=[], window=4
    ),
    "blocks must hold at least one block of tokens": lambda: measure_heads(source_of("Llama 3"), []),
    "batches must hold at least one block": lambda: store_teacher(source_of("Llama 3"), [], "none"),
    "does not hold the complete output of store_teacher": lambda: StoredTeacher("other"),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_linearized_is_refused_in_a_sentence(sentence, in_an_empty_folder):
    with pytest.raises(ValueError, match=sentence) as error:
        REFUSED[sentence]()
    assert isinstance(error.value, linearization.SourceError) or "block" in sentence or "store_teacher" in sentence


def test_losses_of_alignment_by_definition():
    teacher = source_of("Llama 3")
    student, ids, mask = transfer(teacher, kept=[]), random_ids(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[0, 14:] = 0
    seen = []
    for layer in teacher.model.layers:
        layer.self_attn.register_forward_hook(lambda _, __, inputs, output: seen.append((inputs, output)), with_kwargs=True)
    teacher(ids, attention_mask=mask)
    for loss, layer, (inputs, output) in zip(align(student, teacher, ids, mask), student.model.layers, seen):
        plan = student.model.plan(student.model.embed_tokens(ids), mask)[0]
        found, _ = layer.retention(inputs["hidden_states"], plan=plan)
        error, wanted = (found - output[0])[mask == 1], output[0][mask == 1]
        assert loss.item() == pytest.approx((error.square().sum() / wanted.square().sum()).item(), rel=1e-4)


def test_gradients_of_alignment_reach_the_retentions_alone():
    teacher = source_of("Qwen2", num_hidden_layers=3)
    student = transfer(teacher, kept=[1], measures=measure_heads(teacher, [random_ids(2, 30)]))
    parameters, graphs = linearization.prepare_for_alignment(student), []
    with torch.enable_grad():
        assert len(align(student, teacher, random_ids(2, 20), with_loss=graphs.append)) == len(graphs) == 2
        sum(graphs).backward()
    at_once = [parameter.grad.clone() for parameter in parameters]
    student.zero_grad()
    with torch.enable_grad():
        align(student, teacher, random_ids(2, 20), with_loss=lambda loss: loss.backward())
    for parameter, expected in zip(parameters, at_once, strict=True):
        close(parameter.grad, expected, 1e-5)
    assert not any(parameter.grad is not None for parameter in student.model.layers[1].parameters())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def training(folder, **options) -> TrainingArguments:
    fixed = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "remove_unused_columns": False}
    return TrainingArguments(str(folder), learning_rate=3e-3, per_device_train_batch_size=8, **fixed, **options)


def test_alignment_with_trainer_brings_the_layers_closer(tmp_path):
    teacher = source_of("Llama 3")
    blocks = [{"input_ids": block} for block in random_ids(64, 32)]
    student = transfer(teacher, kept=[], measures=measure_heads(teacher, [random_ids(8, 32)]))
    before, frozen = align(student, teacher, random_ids(8, 32, seed=5)), student.lm_head.weight.clone()
    linearization.prepare_for_alignment(student)
    arguments = training(tmp_path, max_steps=40, gradient_accumulation_steps=2)
    data = {"train_dataset": blocks, "eval_dataset": blocks[:8]}
    trainer = linearization.AlignmentTrainer(student, arguments, **data, teacher=teacher)
    with torch.enable_grad():
        trainer.train()
    after = align(student.eval(), teacher, random_ids(8, 32, seed=5))
    assert (after < 0.8 * before).all(), (before, after)
    assert student.lm_head.weight.equal(frozen)
    expected = align(student, teacher, random_ids(64, 32)[:8]).mean().item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("stored", [False, True])
def test_distillation_with_trainer_brings_the_distributions_closer(tmp_path, stored):
    teacher, ids, held_out = source_of("Llama 3"), random_ids(64, 24), random_ids(8, 24, seed=5)
    student = transfer(teacher, kept=[], measures=measure_heads(teacher, [random_ids(8, 24)]))
    before = divergence(student(held_out).logits, teacher(held_out).logits).mean()
    data = [{"input_ids": block} for block in ids]
    if stored:
        store_teacher(teacher, ids.split(16), tmp_path / "teacher", k=96)
        data = StoredTeacher(tmp_path / "teacher")
        assert len(data) == 64
    arguments, asked = training(tmp_path, max_steps=30), None if stored else teacher
    with torch.enable_grad():
        linearization.DistillationTrainer(student, arguments, train_dataset=data, teacher=asked).train()
    assert divergence(student.eval()(held_out).logits, teacher(held_out).logits).mean() < 0.8 * before


def test_divergence_by_definition():
    logits, teacher = torch.randn(2, 3, 5, 11)
    p, q = teacher.double().softmax(-1), logits.double().softmax(-1)
    whole = (p * (p / q).log()).sum(-1)
    torch.testing.assert_close(divergence(logits, teacher).double(), whole, rtol=1e-4, atol=1e-6)
    top = teacher.log_softmax(-1).topk(4)
    told, own = p.gather(-1, top.indices), q.gather(-1, top.indices)
    rest, own_rest = 1 - told.sum(-1), 1 - own.sum(-1)
    expected = (told * (told / own).log()).sum(-1) + rest * (rest / own_rest).log()
    found = divergence_of_top(logits, top.values, top.indices).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (found <= whole + 1e-6).all()
    equal = divergence_of_top(teacher, top.values, top.indices)
    torch.testing.assert_close(equal, torch.zeros(3, 5), rtol=0, atol=1e-5)


def test_asking_a_teacher_goes_on_after_an_interruption(tmp_path):
    teacher, ids = source_of("Llama 3"), random_ids(10, 24)

    def interrupted():
        yield from ids.split(4)[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store_teacher(teacher, interrupted(), tmp_path / "teacher", k=5)
    with pytest.raises(ValueError, match="the complete output of store_teacher"):
        StoredTeacher(tmp_path / "teacher")
    asked = []
    handle = teacher.model.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[0]))
    store_teacher(teacher, ids.split(4), tmp_path / "teacher", k=5)
    handle.remove()
    assert [len(each) for each in asked] == [2]
    stored, top = StoredTeacher(tmp_path / "teacher"), teacher(ids).logits.log_softmax(-1).topk(5)
    assert len(stored) == 10
    for index in (0, 5, 9):
        assert stored[index]["input_ids"].equal(ids[index])
        assert stored[index]["top_indices"].equal(top.indices[index])
        close(stored[index]["top_log_probs"].float(), top.values[index], 2e-3)


def test_answers_to_another_question_are_not_taken_for_those_that_are_asked(tmp_path):
    teacher, ids, others = source_of("Llama 3"), random_ids(10, 24), random_ids(10, 24, seed=1)
    store_teacher(teacher, ids.split(4), tmp_path, k=5)
    store_teacher(teacher, [ids[:4], *others[4:].split(3)], tmp_path, k=5)
    stored = StoredTeacher(tmp_path)
    assert stored[3]["input_ids"].equal(ids[3])
    assert stored[-1]["input_ids"].equal(others[9])
    store_teacher(teacher, ids.split(4), tmp_path, k=3)
    stored = pickle.loads(pickle.dumps(StoredTeacher(tmp_path)))  # as for the workers of a data loader
    assert stored[9]["top_indices"].equal(teacher(ids[9:]).logits[0].topk(3).indices)
    with pytest.raises(IndexError):
        stored[10]


class Saved:
    """A tensor that a backward pass needs, among those that are held."""

    held, peak = weakref.WeakSet(), 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        Saved.held.add(self)
        Saved.peak = max(Saved.peak, sum(saved.tensor.nbytes for saved in Saved.held))


def peak_of_a_step(layers: int) -> int:
    """The most bytes that are saved for backward passes at once in a step of alignment."""
    teacher = source_of("Llama 3", num_hidden_layers=layers)
    student = transfer(teacher, kept=[], measures=measure_heads(teacher, [random_ids(2, 16)]))
    parameters, Saved.peak = linearization.prepare_for_alignment(student), 0
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        align(student, teacher, random_ids(4, 64), with_loss=lambda loss: loss.backward())
    assert all(parameter.grad.abs().sum() > 0 for parameter in parameters if parameter.ndim > 1)
    return Saved.peak


@torch.enable_grad()
def test_the_activations_of_alignment_are_those_of_one_layer():
    two, eight = peak_of_a_step(2), peak_of_a_step(8)
    activations = 4 * 64 * 32 * 4  # B T D bytes
    assert two > 5 * activations  # what is counted are activations
    assert eight < two + activations / 2


@torch.enable_grad()
def test_alignment_in_half_precision_has_the_gradients_of_a_backward_pass_outside_autocast(tmp_path):
    """That of a layer runs within the forward pass of the teacher, where autocast is on."""
    teacher = source_of("Llama 3")
    student = transfer(teacher, kept=[], measures=measure_heads(teacher, [random_ids(2, 16)]))
    ids = random_ids(2, 150)  # several chunks
    parameters = linearization.prepare_for_alignment(student)

    def without_autocast(loss):
        with torch.autocast("cpu", enabled=False):
            (loss / 2).backward()

    with torch.autocast("cpu", torch.bfloat16):
        align(student, teacher, ids, with_loss=without_autocast)
    expected = [parameter.detach() - 0.1 * parameter.grad for parameter in parameters]
    student.zero_grad()
    arguments = TrainingArguments(
        tmp_path, max_steps=1, learning_rate=0.1, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant", bf16=True,
        per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    blocks = [{"input_ids": row} for row in ids]
    linearization.AlignmentTrainer(student, arguments, teacher=teacher, train_dataset=blocks).train()
    for parameter, wanted in zip(parameters, expected):
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("trained", [True, False])
@torch.enable_grad()
def test_the_divergence_by_rows_is_that_of_all_logits(monkeypatch, trained):
    monkeypatch.setattr("retnet_hf.linearization.distillation.ROWS", 3)
    generator = torch.Generator().manual_seed(0)
    shapes = (8, 6), (11, 6), (8, 5), (11, 5)
    hidden, weight, teacher, head = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    hidden.requires_grad_()
    weight.requires_grad_(trained)
    wanted = [hidden, weight][: 1 + trained]
    expected = divergence(hidden.float() @ weight.float().T, teacher.float() @ head.float().T).mean()
    found = DivergenceByRows.apply(hidden.float(), weight.float(), teacher.float(), head.float())
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(3 * found, wanted), torch.autograd.grad(3 * expected, wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
@torch.enable_grad()
def test_the_loss_of_distillation_is_the_mean_divergence_of_present_tokens(tmp_path, padded):
    source, ids = source_of("Qwen3"), random_ids(3, 20)
    student, mask = transfer(source, kept=[0]), torch.ones(3, 20, dtype=torch.int64)
    if padded:
        mask[1, :7] = mask[2, :15] = 0
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    trainer = linearization.DistillationTrainer(student, arguments, train_dataset=[], teacher=source)
    inputs = {"input_ids": ids} | ({"attention_mask": mask} if padded else {})
    loss = trainer.compute_loss(student, inputs)
    each = divergence(student(**inputs).logits, source(**inputs).logits.detach())[mask.bool()]
    torch.testing.assert_close(loss, each.mean(), rtol=1e-4, atol=1e-6)
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    for one, other in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(each.mean(), parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
