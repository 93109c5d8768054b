"""fused_policy_loss over the head's kernels: bfloat16 operands against float64, and a row's bits in any company."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from policy_fixtures import OWN, SCENES, SETTINGS, H, Head, N, V
from tolerances import POLICY_GRADIENT_BFLOAT16, POLICY_LOSS_FLOAT32, POLICY_LOSS_FLOAT32_FAR
from xdkernels.policy_loss import fused_policy_loss


def on(device, batch):
    """The batch's tensors on a device, by name."""
    moved = {field.name: getattr(batch, field.name) for field in fields(batch)}
    advantages = {level: values.to(device) for level, values in moved.pop("advantages").items()}
    return {"advantages": advantages, **{name: tensor.to(device) for name, tensor in moved.items()}}


def call(device, head, own, *, frozen=True, strided=False, again=False, **changes):
    """Loss, metrics, and the leaves after a backward with an upstream gradient of -2.5 (again: after a second one)."""
    name, ratio_level, advantage_level = own
    batch = on(device, head.batch)
    hidden = head.hidden.clone().to(device).requires_grad_()
    weight = head.weight.clone().to(device)
    weight = (weight.mT.contiguous().mT if strided else weight).requires_grad_(not frozen)
    arguments = {
        "objective": name, "ratio_level": ratio_level, "advantage_level": advantage_level, **SETTINGS[name],
        "mask": batch["mask"], "cu_seqlens": batch["cu_seqlens"], **changes,
    }  # fmt: skip
    operands = (batch["labels"], batch["advantages"][advantage_level], batch["old_logprobs"])
    options = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in head.options.items()}
    loss, metrics = fused_policy_loss(hidden, weight, *operands, **options, **arguments)
    (-2.5 * loss).backward(retain_graph=again)
    if again:
        first = hidden.grad
        hidden.grad = weight.grad = None
        (-2.5 * loss).backward()
        assert torch.equal(hidden.grad, first)
    return loss, metrics, hidden, weight


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("own", OWN, ids=[own[0] for own in OWN])
def test_agrees_with_float64(device, own, frozen):
    head = Head(torch.bfloat16)
    reference = head.batch.reference_logprobs.to(device)
    loss, _, *leaves = call(device, head, own, frozen=frozen, beta=0.05, reference_logprobs=reference)
    wanted, oracles = head.oracle(head.leaves(), *own, beta=0.05)
    (-2.5 * wanted).backward()
    assert abs(loss.item() - wanted.item()) < POLICY_LOSS_FLOAT32
    for leaf, oracle in zip(leaves, oracles[: 1 if frozen else 2], strict=False):
        error = (leaf.grad.cpu().double() - oracle.grad).abs().max() / oracle.grad.abs().max()
        assert float(error) < POLICY_GRADIENT_BFLOAT16
    assert (leaves[1].grad is None) == frozen


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen head", "trained head"])
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("own", OWN, ids=[own[0] for own in OWN])
def test_heads_at_their_edges(device, own, scene, frozen):
    """A weight of other strides, and a second backward, with each of them."""
    head = Head(torch.bfloat16, **SCENES[scene])
    loss, _, *leaves = call(device, head, own, frozen=frozen, strided=True, again=True)
    wanted, oracles = head.oracle(head.leaves(), *own, beta=0.0)
    (-2.5 * wanted).backward()
    assert abs(loss.item() - wanted.item()) < POLICY_LOSS_FLOAT32_FAR
    for leaf, oracle in zip(leaves, oracles[: 1 if frozen else 2], strict=False):
        error = (leaf.grad.cpu().double() - oracle.grad).abs().max() / oracle.grad.abs().max()
        assert float(error) < POLICY_GRADIENT_BFLOAT16


@pytest.mark.parametrize("own", OWN, ids=[own[0] for own in OWN])
def test_the_gradient_of_a_sequence_does_not_depend_on_its_neighbours(device, own):
    head = Head(torch.bfloat16)
    rows = head.batch.mask & (head.batch.sequence_ids == 2)
    _, _, together, _ = call(device, head, own, denominator=50.0)
    _, _, alone, _ = call(device, head, own, denominator=50.0, mask=rows.to(device))
    assert torch.equal(alone.grad[rows.to(device)], together.grad[rows.to(device)])
    assert float(alone.grad[~rows.to(device)].abs().max()) == 0
    head.hidden[rows.nonzero()[0], 0] *= 1 + 2**-7  # negative control: one element of one of its rows, by one bit
    _, _, other, _ = call(device, head, own, denominator=50.0, mask=rows.to(device))
    assert not torch.equal(alone.grad, other.grad)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen head", "trained head"])
def test_a_part_without_active_rows(device, frozen):
    head = Head(torch.bfloat16)
    nothing = torch.zeros(N, dtype=torch.bool, device=device)
    loss, metrics, hidden, weight = call(device, head, OWN[4], frozen=frozen, mask=nothing, denominator=50.0)
    assert loss.item() == 0
    assert hidden.grad.shape == (N, H)
    assert float(hidden.grad.abs().max()) == 0
    if not frozen:
        assert weight.grad.shape == (V, H)
        assert float(weight.grad.abs().max()) == 0
    assert metrics["ratio_p50"].isnan()
