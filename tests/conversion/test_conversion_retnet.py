"""Every public RetNet format gives the model that wrote it: its logits, hidden states, states, gradients and tokens."""

import math
from dataclasses import replace

import pytest
import torch
from golden import KEPT, NAMES, SMALL, Golden, at_hand, golden
from small_models import small_model

from retnet_hf import RetNetConfig, RetNetForCausalLM
from retnet_hf.conversion import moves
from retnet_hf.conversion.changes import known, pairs_apart
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.conversion.fla import FLA, from_fla, to_fla
from retnet_hf.conversion.moves import Conversion, Move, shapes_of
from retnet_hf.conversion.syncdoth import from_syncdoth, to_syncdoth
from retnet_hf.conversion.torchscale import TORCHSCALE, from_torchscale, to_torchscale
from retnet_hf.conversion.yet_another_retnet import from_yet_another_retnet


FORMS = ("parallel", "recurrent", "chunkwise")
READERS = {"fla": from_fla, "fla_2025_02": from_fla, "torchscale": from_torchscale, "syncdoth": from_syncdoth}
WRITERS = {"fla": to_fla, "fla_2025_02": to_fla, "torchscale": to_torchscale, "syncdoth": to_syncdoth}
FLA_CASES = [
    "fla/hub_options",
    "fla/gqa_noaffine",
    "fla/unfused_nogate_relu",
    "fla/left_padded",
    "fla_2025_02/fused_gate_proj",
]
TORCHSCALE_CASES = [
    "torchscale/swish_scaled_untied",
    "torchscale/gelu_tied_lnemb",
    "torchscale/deepnorm_postnorm",
    "syncdoth/published_options",
    "syncdoth/lm_decay_tied",
    "syncdoth/left_padded",
]
CASES = at_hand(FLA_CASES + TORCHSCALE_CASES)
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}
# Where the norms' epsilon counts, the peer's parallel form is this far from its own recurrence, which is what we compute.
SPREAD = {"torchscale/gelu_tied_lnemb": 1e-3}


def read(case: str) -> tuple[RetNetForCausalLM, Golden]:
    data = golden(case)
    return READERS[case.split("/")[0]](data.state_dict, data.config), data


def inputs_of(data: Golden) -> dict[str, torch.Tensor]:
    return {name: data.tensors[name] for name in ("input_ids", "attention_mask") if name in data.tensors}


def real_tokens(data: Golden) -> torch.Tensor:
    """(B, T) bool: where outputs have a meaning."""
    return data.tensors.get("attention_mask", torch.ones_like(data.tensors["input_ids"])).bool()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_peers_in_every_form(case, form):
    model, data = read(case)
    with torch.no_grad():
        logits = model(**inputs_of(data), retention_form=form).logits
    real = real_tokens(data)
    for name in ("logits", "logits_recurrent", "logits_steps", "logits_chunk", "logits_parallel"):
        if name in data.tensors and not (name == "logits" and case in SPREAD):
            torch.testing.assert_close(logits[real], data.tensors[name][real], **TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_are_the_peers(case):
    model, data = read(case)
    with torch.no_grad():
        output = model(**inputs_of(data), output_hidden_states=True)
    real = real_tokens(data)
    tolerance = TOLERANCE | {"atol": SPREAD.get(case, TOLERANCE["atol"])}
    compared = 0
    for layer, ours in enumerate(output.hidden_states[:-1]):
        if (theirs := data.tensors.get(f"hidden_states.{layer}")) is not None:
            torch.testing.assert_close(ours[real], theirs[real], **tolerance)
            compared += 1
    torch.testing.assert_close(output.hidden_states[-1][real], data.tensors["last_hidden_state"][real], **tolerance)
    assert compared >= 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "case", [case for case in CASES if case != "syncdoth/left_padded"]
)  # it counts padding as positions
def test_states_are_the_peers(case, form):
    model, data = read(case)
    with torch.no_grad():
        state = model(**inputs_of(data), retention_form=form).past_key_values
    for layer in range(model.config.num_hidden_layers):
        ours = state.layers[layer].recurrent_states
        if case in FLA_CASES:
            torch.testing.assert_close(ours, data.tensors[f"state.{layer}.recurrent_state"], atol=5e-4, rtol=1e-4)
            continue
        # theirs: values by keys, divided by the root of the sum of decays, and the keys scaled where our queries are
        scale = data.tensors[f"state.{layer}.scale"]
        theirs = (
            data.tensors[f"state.{layer}.prev_key_value"] * scale.reshape(-1, model.config.num_attention_heads, 1, 1).sqrt()
        )
        theirs = theirs.transpose(-1, -2) * math.sqrt(model.config.head_dim)  # (B, H, K, V)
        theirs = theirs.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2, 3)  # pairs of keys set apart
        spread = 10 * SPREAD.get(case, 0)
        torch.testing.assert_close(ours, theirs, atol=5e-4 + spread, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_the_peers(case):
    model, data = read(case)
    expected = data.tensors["greedy_ids"]
    new = expected.shape[1]
    mask = real_tokens(data).long()  # given, or generate() takes a token for padding that is one of the text
    generated = model.generate(
        data.tensors["input_ids"],
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
    )
    assert generated[:, -new:].tolist() == expected.tolist()


@pytest.mark.parametrize("form", ["parallel", "chunkwise"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_the_peers(case, form):
    model, data = read(case)
    labels = data.tensors.get("labels", data.tensors["input_ids"])
    output = model(**inputs_of(data), labels=labels, retention_form=form)
    loss = output.loss
    if coefficient := data.config.get("z_loss_coeff"):  # syncdoth's own term, of the tokens that are predicted
        loss = loss + coefficient * output.logits[:, :-1][labels[:, 1:] != -100].logsumexp(-1).log().mean()
    torch.testing.assert_close(loss.detach().reshape(1), data.tensors["loss"].reshape(1), atol=1e-4, rtol=1e-4)
    loss.backward()

    dialect = FLA if case in FLA_CASES else TORCHSCALE
    parameters = dict(model.named_parameters())
    assert data.gradients()
    for name, theirs in data.gradients().items():
        theirs = theirs.clone()
        whole = name if name.startswith(("model.", "lm_head", "output_projection")) else f"model.{name}"
        ours = dialect.ours(whole, model.config)
        gradient = parameters[ours].grad
        if ours.endswith(("q_proj.weight", "k_proj.weight")) and dialect.interleaved:
            [gradient] = pairs_apart(model.config.head_dim).backward([gradient])
        if theirs.shape[0] == 2 * gradient.shape[0]:
            gradient = torch.cat([gradient, parameters[ours.replace("gate_proj", "up_proj")].grad])
        if "embed_tokens" in name and (pad := data.config.get("pad_token_id")) is not None:
            gradient[pad] = theirs[pad] = 0  # the peer's embedding never learns it
        torch.testing.assert_close(gradient, theirs, atol=3e-4, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_bit_exact_under_exactly_the_peers_names(case):
    model, data = read(case)
    peer = case.split("/")[0]
    written, config = WRITERS[peer](model)
    if peer != "fla_2025_02":  # to_fla writes the present layout
        assert set(written) == set(data.state_dict)
        for name, theirs in data.state_dict.items():
            assert written[name].dtype == theirs.dtype
            if "retnet_rel_pos" in name:  # recomputed
                torch.testing.assert_close(written[name], theirs, atol=0, rtol=1e-6)
            else:
                assert torch.equal(written[name], theirs), name
    again = READERS[peer](written, config)
    for name, parameter in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name
    with torch.no_grad():
        inputs = inputs_of(data)
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("case", ["fla/unfused_nogate_relu", "torchscale/swish_scaled_untied", "syncdoth/published_options"])
def test_what_is_written_keeps_the_type(case):
    data = golden(case)
    peer = case.split("/")[0]
    half = {name: value.bfloat16() for name, value in data.state_dict.items()}
    model = READERS[peer](half, data.config)
    assert model.dtype == torch.bfloat16
    assert model.config.dtype == torch.bfloat16
    assert torch.equal(model.model.decay.log_decay, READERS[peer](data.state_dict, data.config).model.decay.log_decay)
    written, _ = WRITERS[peer](model)
    assert all(torch.equal(written[name], value) for name, value in half.items() if "retnet_rel_pos" not in name)


REFUSED = {
    "torchscale_2023_07/gelu_subln": (from_torchscale, ["retention.q_proj.bias", "ffn.ffn_layernorm.weight"]),
    "syncdoth/ffn_no_glu": (from_syncdoth, ["ffn.fc1.bias", "ffn.fc2.bias", "ffn.ffn_layernorm.weight"]),
    "yet_another_retnet/norm_first_swish": (from_yet_another_retnet, ["linear1.bias", "norm1.bias", "out.bias"]),
    "yet_another_retnet/norm_last_gelu": (from_yet_another_retnet, ["linear1.bias", "norm1.bias", "out.bias"]),
}


@pytest.mark.parametrize("case", at_hand(REFUSED))
def test_layouts_without_a_counterpart_are_refused_by_the_names_of_what_has_no_place(case):
    (reader, homeless), data = REFUSED[case], golden(case)
    with pytest.raises(CheckpointError, match="without a place in RetNetConfig") as error:
        reader(data.state_dict, data.config)
    assert all(name in str(error.value) for name in homeless)


EXPRESSIBLE = {"rotary_endpoint": True, "head_norm_affine": False}


@pytest.mark.parametrize(
    ("writer", "fields", "named"),
    [
        (to_fla, {"rotary_endpoint": True}, "rotary_endpoint"),
        (to_fla, {"decay_schedule": "log_linear"}, "decay_schedule"),
        (to_fla, {"use_gated_mlp": False}, "use_gated_mlp"),
        (to_fla, {"hidden_act": "gelu"}, "hidden_act"),
        (to_fla, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rope_parameters"),
        (to_fla, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
        (to_fla, {"qkv_bias": True}, "qkv_bias"),
        (to_torchscale, EXPRESSIBLE | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters"),
        (to_torchscale, EXPRESSIBLE | {"use_qk_norm": True}, "use_qk_norm"),
        (to_torchscale, {}, "rotary_endpoint"),
        (to_torchscale, EXPRESSIBLE | {"decay_schedule": "log_linear"}, "decay_schedule"),
        (to_torchscale, EXPRESSIBLE | {"embedding_multiplier": 3.0}, "embedding_multiplier"),
        (to_torchscale, EXPRESSIBLE | {"num_key_value_heads": 2}, "num_key_value_heads"),
        (to_syncdoth, EXPRESSIBLE | {"decay_schedule": "none"}, "decay_schedule"),
    ],
)
def test_what_a_format_cannot_express_is_refused_by_the_field(writer, fields, named):
    with pytest.raises(ValueError, match=rf"^{named} must"):
        writer(small_model(**fields))


def test_setting_pairs_apart_and_together_are_inverse_and_move_whole_rows():
    weight = torch.arange(12)[:, None].repeat(1, 3)  # two heads of six
    [apart] = pairs_apart(6).forward([weight])
    assert apart[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(pairs_apart(6).backward([apart])[0], weight)


def test_every_tensor_is_used_once_or_named():
    state_dict, config = to_fla(small_model())
    name = "model.layers.1.attn.k_proj.weight"
    with pytest.raises(CheckpointError, match=rf"tensor {name} is missing"):
        from_fla({key: value for key, value in state_dict.items() if key != name}, config)
    with pytest.raises(CheckpointError, match="tensor model.layers.0.attn.extra.weight has no place"):
        from_fla(state_dict | {"model.layers.0.attn.extra.weight": torch.ones(2)}, config)
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \(32, 31\), but .* \(32, 32\)"):
        from_fla(state_dict | {name: torch.ones(32, 31)}, config)
    with pytest.raises(CheckpointError, match=rf"tensor {name} holds values that are not finite"):
        from_fla(state_dict | {name: torch.full((32, 32), math.nan)}, config)
    for dtype in (torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(CheckpointError, match=rf"tensor {name} is of type {dtype}: only checkpoints of 16 bits or more"):
            from_fla(state_dict | {name: torch.ones(32, 32).to(dtype)}, config)
    with pytest.raises(CheckpointError, match=rf"tensor {name} has dtype torch.int32, but .* cannot have it"):
        from_fla(state_dict | {name: torch.ones(32, 32, dtype=torch.int32)}, config)


def test_equal_fields_that_mean_something_else_are_refused(monkeypatch):
    """What the fields mean can depend on others, as decays do on factors of each layer."""
    ours, again = small_model().config, small_model().config
    monkeypatch.setattr(moves, "meaning", lambda config: {"vocab_size": 96, "decay_schedule": id(config)})
    with pytest.raises(ValueError, match="decay_schedule, with fields that change it, has no counterpart in the format fla"):
        moves.require_same(ours, again, "fla")


def test_a_tensor_that_two_of_theirs_would_become_is_refused():
    state_dict, config = to_fla(small_model())
    twice = state_dict | {"model.layers.0.retention.q_proj.weight": state_dict["model.layers.0.attn.q_proj.weight"]}
    with pytest.raises(CheckpointError, match=r"2 tensors of the checkpoint would become .*\.0\.retention\.q_proj\.weight"):
        from_fla(twice, config)


def test_a_tensor_that_would_be_used_twice_is_refused():
    model = small_model()
    shapes = shapes_of(model.state_dict())
    moves = [Move((name,), (name,)) for name in shapes]
    plan = Conversion("ours", RetNetForCausalLM, model.config, moves)
    plan.check(shapes)
    norms = Move(("model.layers.0.mlp_norm.weight",), ("model.norm.weight",))
    plan = replace(plan, moves=[norms if move.targets == norms.targets else move for move in moves])
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp_norm\.weight would be used 2 times"):
        plan.check(shapes)


def test_a_buffer_that_contradicts_the_configuration_is_refused():
    state_dict, config = to_torchscale(small_model(**EXPRESSIBLE))
    decay = torch.full_like(state_dict["retnet_rel_pos.decay"], -0.5)
    with pytest.raises(CheckpointError, match=r"retnet_rel_pos\.decay holds other values"):
        from_torchscale(state_dict | {"retnet_rel_pos.decay": decay}, config)
    without = {name: value for name, value in state_dict.items() if "retnet_rel_pos" not in name}
    assert from_torchscale(without, config).num_parameters() == small_model(**EXPRESSIBLE).num_parameters()


def test_the_frequencies_of_another_convention_are_told_at_any_size():
    size = 256  # at which the two conventions are nowhere further apart than 0.003
    angle = 10000 ** -torch.linspace(0, 1, size // 2)
    other = 10000 ** -(torch.arange(0, size, 2) / size)
    known(angle).forward([angle.bfloat16()])
    with pytest.raises(CheckpointError, match="other values"):
        known(angle).forward([other])


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused():
    state_dict, config = to_torchscale(small_model(**EXPRESSIBLE, tie_word_embeddings=True))
    state_dict["output_projection.weight"] = state_dict["output_projection.weight"] + 1
    with pytest.raises(CheckpointError, match="output_projection.weight differs"):
        from_torchscale(state_dict, config)


@pytest.mark.parametrize("peer", ["fla", "syncdoth"])
def test_a_model_that_trainer_has_left_without_cache_is_written_with_it(peer):
    model = small_model(**({} if peer == "fla" else EXPRESSIBLE))
    model.config.use_cache = False  # as Trainer does
    assert WRITERS[peer](model)[1]["use_cache"] is True


def test_a_torchscale_preset_of_another_width_is_still_expressible():
    config = RetNetConfig.from_preset("torchscale-base", hidden_size=96, intermediate_size=64, vocab_size=31)
    assert to_torchscale(RetNetForCausalLM(config))[1]["no_scale_embedding"] is False


@pytest.mark.parametrize("dialect", [FLA, TORCHSCALE])
def test_each_name_of_a_dialect_becomes_ours_and_theirs_again(dialect):
    model = small_model("torchscale" if dialect is TORCHSCALE else "fla", use_embedding_norm=dialect is TORCHSCALE)
    names = list(model.state_dict())
    theirs = [dialect.theirs(name, model.config) for name in names]
    assert len(set(theirs)) == len(names)
    assert [dialect.ours(name, model.config) for name in theirs] == names
    assert [dialect.theirs(dialect.ours(name, model.config), model.config) for name in theirs] == theirs
    without_prefix = [name.removeprefix("model.") for name in theirs]
    assert [dialect.ours(name, model.config) for name in without_prefix] == [name.removeprefix("model.") for name in names]


def test_the_small_set_is_part_of_the_full_one():
    """Each case that a clone has, tensor by tensor; without the full set, that it can be read."""
    for case in KEPT + NAMES:
        small, full = golden(case, SMALL), golden(case)
        assert set(small.state_dict) == set(full.state_dict)
        assert case in NAMES or (small.state_dict.keys() and small.gradients())
        values = {} if case in NAMES else {**small.state_dict, **small.tensors}
        for name, value in values.items():
            assert torch.equal(value, {**full.state_dict, **full.tensors}[name]), name
