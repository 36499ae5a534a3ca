# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Manhattan retention: every form is the masked product that RMT's paper writes down, spelled out here from coordinates."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retnet_hf.vision import manhattan_retention as forms_of_images
from retnet_hf.vision.manhattan_retention import COMBINED_AT_ONCE, chunkwise_manhattan_retention, manhattan_retention


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
FORMS = ("parallel", "recurrent", "chunkwise", "auto")
SIDES = st.one_of(st.sampled_from([1, 2, 3, 7, 11, 16]), st.integers(1, 14))
TILES = st.one_of(st.none(), st.integers(1, 17), st.tuples(st.integers(1, 17), st.integers(1, 17)))


class Image:
    """Random operands on one grid, and what each form makes of them."""

    def __init__(self, seed, height, width, dtype=torch.float64, mask=False, key_dim=3, value_dim=5, learned=True):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        batch, heads = 2, 2
        self.query, self.key = (normal(batch, heads, height, width, key_dim) for _ in range(2))
        self.value = normal(batch, heads, height, width, value_dim)
        decay = 0.2 + 0.8 * torch.rand(heads, generator=generator, dtype=torch.float64)
        self.log_decay = decay.log().to(dtype).requires_grad_(learned)
        self.mask = torch.rand(batch, height, width, generator=generator) < 0.6 if mask else None

    def run(self, form, **options):
        return manhattan_retention(self.query, self.key, self.value, self.log_decay, self.mask, form, **options)

    def masked_product(self):
        height, width = self.query.shape[2:4]
        y, x = (axis.flatten() for axis in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
        distance = (y[:, None] - y).abs() + (x[:, None] - x).abs()  # (T, T)
        decay = self.log_decay.exp()[:, None, None] ** distance
        query, key, value = (tensor.flatten(2, 3) for tensor in (self.query, self.key, self.value))
        if self.mask is not None:
            value = value * self.mask.flatten(1)[:, None, :, None]
        return torch.einsum("bhnk,bhmk,hnm,bhmv->bhnv", query, key, decay, value).unflatten(2, (height, width))

    def gradients(self, output):
        """Of a scalar that weighs every number differently; outputs at absent tokens have no meaning and no weight."""
        weight = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
        loss, leaves = (weight * self.visible(output)).sum(), [self.query, self.key, self.value]
        leaves += [self.log_decay] if self.log_decay.requires_grad else []
        return torch.autograd.grad(loss, leaves)

    def visible(self, output):
        return output if self.mask is None else output * self.mask[:, None, :, :, None]


def assert_close(actual, expected, dtype, name):
    # a decay has one number per head, which adds up as many terms of both signs as there are pairs of tokens
    slack = 10 if name == "decay gradient" and dtype == torch.float32 else 1
    atol = slack * TOLERANCE[dtype] * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")


NAMES = ("query gradient", "key gradient", "value gradient", "decay gradient")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(list(TOLERANCE)),
    height=SIDES,
    width=SIDES,
    tile_size=TILES,
    mask=st.booleans(),
    form=st.sampled_from(FORMS),
    learned=st.booleans(),
)
def test_every_form_is_the_masked_product_outputs_and_gradients(seed, dtype, height, width, tile_size, mask, form, learned):
    image = Image(seed, height, width, dtype, mask, learned=learned)
    expected, output = image.masked_product(), image.run(form, tile_size=tile_size)
    assert output.dtype == dtype
    assert output.isfinite().all()
    assert_close(image.visible(output), image.visible(expected), dtype, "output")
    for name, actual, reference in zip(NAMES, image.gradients(output), image.gradients(expected)):
        assert_close(actual, reference, dtype, name)


def test_the_gradient_of_a_gradient_is_that_of_the_masked_product():
    image, found = Image(0, 9, 8, mask=True, learned=False), []
    leaves = [image.query, image.key, image.value]
    for output in (image.run("chunkwise", tile_size=(3, 4)), image.masked_product()):
        first = torch.autograd.grad(image.visible(output).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(gradient.square().sum() for gradient in first), leaves))
    for name, actual, reference in zip(NAMES, *found):
        assert_close(actual, reference, torch.float64, name)

    def of_query(query, decay, form):
        def loss(query):
            return manhattan_retention(query, key, value, decay, form=form, tile_size=4).square().sum()

        return torch.func.grad(loss)(query)

    query, key, value = (tensor.detach() for tensor in leaves)
    mixed = [
        torch.func.grad(lambda decay, form=form: of_query(query, decay, form).sin().sum())(image.log_decay)
        for form in ("chunkwise", "parallel")
    ]
    assert_close(*mixed, torch.float64, "second derivative")


@pytest.mark.parametrize("asked", ["query", "key", "value"])
def test_a_gradient_that_is_asked_for_alone_is_the_same(asked):
    image = Image(0, 9, 8, mask=True, learned=False)
    expected = dict(zip(("query", "key", "value"), image.gradients(image.run("parallel"))))[asked]
    for name in {"query", "key", "value"} - {asked}:
        getattr(image, name).requires_grad_(False)
    output = image.run("chunkwise", tile_size=4)
    weight = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
    (weight * image.visible(output)).sum().backward()
    assert_close(getattr(image, asked).grad, expected, torch.float64, asked)


@pytest.mark.parametrize(("height", "width"), [(2, 200), (65, 3), (1, 200), (4, 2 * COMBINED_AT_ONCE + 5)])
def test_long_and_narrow_images_are_those_of_the_masked_product(height, width):
    """Also with lines that are longer than one product, which are combined in blocks."""
    for image in (Image(0, height, width), Image(0, width, height)):
        expected = image.masked_product()
        for tile_size in (8, (height, 16), (16, width), (2, width), (width, 2), None):
            assert_close(image.run("chunkwise", tile_size=tile_size), expected, torch.float64, f"tile size {tile_size}")


def test_the_map_times_the_values_is_the_output():
    image = Image(5, 4, 6, mask=True)
    scores = forms_of_images.manhattan_map(image.query, image.key, image.log_decay, image.mask)
    assert scores.shape == (2, 2, 24, 24)
    output = (scores @ image.value.flatten(2, 3)).unflatten(2, (4, 6))
    assert_close(output, image.masked_product(), torch.float64, "output")
    assert torch.equal(output, image.run("parallel", scores=scores))


@pytest.mark.parametrize("decay", [1.0, 0.999999, 1e-6])
@pytest.mark.parametrize("form", FORMS)
def test_extreme_decays(form, decay):
    image = Image(7, 19, 17)
    with torch.no_grad():
        image.log_decay.fill_(torch.tensor(decay, dtype=torch.float64).log())
    assert_close(image.run(form, tile_size=6), image.masked_product(), torch.float64, "output")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["parallel", "recurrent", "chunkwise"])
def test_half_precision_and_autocast_are_computed_in_float32(form, dtype):
    """Gradients, which have the dtypes of their operands, as well: those of chunks under autocast, too."""
    image, exact = Image(8, 20, 15, dtype, learned=False), Image(8, 20, 15, learned=False)
    for name in ("query", "key", "value", "log_decay"):  # what is left of them in `dtype`
        getattr(exact, name).data = getattr(image, name).detach().double()
    expected = exact.masked_product()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = image.run(form, tile_size=4)
    assert output.dtype == torch.float32
    assert_close(output.double(), expected, torch.float32, "output")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=form == "chunkwise"):
        gradients = image.gradients(output)
    for name, actual, reference in zip(NAMES, gradients, exact.gradients(expected)):
        assert actual.dtype == dtype, name
        bound = max(torch.finfo(dtype).eps, 1e-5) * reference.abs().max()
        torch.testing.assert_close(actual.double(), reference, rtol=0, atol=bound)


@pytest.mark.parametrize("form", ["parallel", "recurrent", "chunkwise"])
def test_compiles_as_one_graph(form):
    image = Image(10, 3, 3, torch.float32, mask=True)
    compiled = torch.compile(manhattan_retention, fullgraph=True, backend="eager")
    output = compiled(image.query, image.key, image.value, image.log_decay, image.mask, form, 2)
    assert_close(output, image.run(form, tile_size=2), torch.float32, "output")
    gradients = image.gradients(output), image.gradients(image.run(form, tile_size=2))
    for name, actual, expected in zip(NAMES, *gradients):
        assert_close(actual, expected, torch.float32, name)


class Operator(torch.nn.Module):
    def __init__(self, log_decay, form):
        super().__init__()
        self.log_decay, self.form = torch.nn.Buffer(log_decay), form

    def forward(self, query, key, value):
        return manhattan_retention(query, key, value, self.log_decay, form=self.form, tile_size=2)


def test_exports_with_the_grid_left_open():
    image = Image(12, 40, 30, torch.float32)
    operands = tuple(tensor.detach() for tensor in (image.query, image.key, image.value))
    grid = {2: torch.export.Dim("height", max=512), 3: torch.export.Dim("width", max=512)}
    operator = Operator(image.log_decay.detach(), "auto")
    program = torch.export.export(operator, operands, dynamic_shapes=dict.fromkeys(("query", "key", "value"), grid))
    part = [tensor[:, :, :6, :11].contiguous() for tensor in operands]
    assert_close(program.module()(*part), manhattan_retention(*part, image.log_decay), torch.float32, "output")


def test_memory_kept_for_backward_is_linear_in_the_number_of_tokens():
    def saved_numbers(height, width):
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
            return tensor

        operands = [torch.randn(1, 1, height, width, 16, requires_grad=True) for _ in range(3)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = chunkwise_manhattan_retention(*operands, torch.tensor([-0.1]))
        assert output.shape == (1, 1, height, width, 16)
        return sum(storages.values())

    small = saved_numbers(60, 60)
    assert max(saved_numbers(120, 60), saved_numbers(60, 120)) <= 2.2 * small
    assert small < 3600 * 3600 / 8, "no less than the masked product keeps"


@pytest.mark.parametrize(("height", "width", "form"), [(20, 34, "parallel"), (4, 80, "parallel"), (40, 40, "chunkwise")])
def test_auto_is_parallel_for_few_tokens_and_chunkwise_for_many(height, width, form):
    image = Image(13, height, width, torch.float32, key_dim=32, value_dim=32)
    other = {"parallel": "chunkwise", "chunkwise": "parallel"}[form]
    assert torch.equal(image.run("auto"), image.run(form))
    assert not torch.equal(image.run("auto"), image.run(other))


def test_bad_input_gets_a_sentence():
    image = Image(14, 4, 5)
    query, key, value = image.query, image.key, image.value
    with pytest.raises(ValueError, match="form must be one of auto, parallel, recurrent, chunkwise, got 'fast'"):
        image.run("fast")
    flat = tuple(tensor.flatten(2, 3) for tensor in (query, key, value))
    for operands in ((query, key[:, :, :2], value), (query, key, value[:, :, :, :2]), flat):
        with pytest.raises(ValueError, match="query and key must be"):
            manhattan_retention(*operands, image.log_decay)
