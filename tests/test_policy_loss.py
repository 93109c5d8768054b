"""fused_policy_loss through the head against autograd in float64, and what must not get into it."""

from __future__ import annotations

import dataclasses
import math

import pytest
from tolerances import (
    POLICY_GRADIENT_BFLOAT16,
    POLICY_GRADIENT_FLOAT32,
    POLICY_GRADIENT_FLOAT32_FAR,
    POLICY_LOSS_FLOAT32,
    POLICY_LOSS_FLOAT32_FAR,
)

torch = pytest.importorskip("torch")

from policy_fixtures import EVERY, OWN, SCENES, SETTINGS, H, Head, N, V, oracle_logprobs  # noqa: E402
from xdkernels.policy_loss import fused_policy_loss  # noqa: E402


def loss_of(leaves, head, batch, name, ratio_level, advantage_level, **changes):
    hidden, weight, bias = leaves
    arguments = {
        "objective": name, "ratio_level": ratio_level, "advantage_level": advantage_level,
        **SETTINGS[name], **batch.structure, **head.options, "bias": bias, **changes,
    }  # fmt: skip
    return fused_policy_loss(
        hidden, weight, batch.labels, batch.advantages[advantage_level], batch.old_logprobs, **arguments
    )


def compare(head, name, ratio_level, advantage_level, *, loss_within, gradient_within, frozen=False, beta=0.05):
    leaves = head.leaves(frozen=frozen)
    loss, _ = loss_of(
        leaves, head, head.batch, name, ratio_level, advantage_level,
        beta=beta, reference_logprobs=head.batch.reference_logprobs,
    )  # fmt: skip
    wanted, oracles = head.oracle(leaves, name, ratio_level, advantage_level, beta=beta)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert abs(loss.item() - wanted.item()) < loss_within
    (-2.5 * loss).backward()
    (-2.5 * wanted).backward()
    for leaf, oracle in zip(leaves, oracles, strict=True):
        if leaf is None or not leaf.requires_grad:
            assert leaf is None or leaf.grad is None
            continue
        error = (leaf.grad.double() - oracle.grad).abs().max() / oracle.grad.abs().max()
        assert float(error) < gradient_within
        assert float(oracle.grad.abs().max()) > 1e-4  # there is something to compare


@pytest.mark.parametrize(("name", "ratio_level", "advantage_level"), EVERY)
def test_loss_and_gradients_are_those_of_float64(name, ratio_level, advantage_level):
    compare(
        Head(), name, ratio_level, advantage_level,
        loss_within=POLICY_LOSS_FLOAT32, gradient_within=POLICY_GRADIENT_FLOAT32,
    )  # fmt: skip


NEAR, FAR = (POLICY_LOSS_FLOAT32, POLICY_GRADIENT_FLOAT32), (POLICY_LOSS_FLOAT32_FAR, POLICY_GRADIENT_FLOAT32_FAR)


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize(("name", "ratio_level", "advantage_level"), OWN)
def test_heads_of_every_kind(scene, name, ratio_level, advantage_level):
    loss_within, gradient_within = FAR if scene in ("peaked", "far below zero") else NEAR
    compare(
        Head(**SCENES[scene]), name, ratio_level, advantage_level,
        loss_within=loss_within, gradient_within=gradient_within,
    )  # fmt: skip


def test_the_peaked_softmaxes_are_peaked_and_the_far_logits_far():
    head = Head(**SCENES["peaked"])
    logprobs = oracle_logprobs(head.hidden, head.weight, head.batch.labels)
    assert float(logprobs[1::2].min()) < -40
    assert float(logprobs[::2].exp().median()) > 0.99
    head = Head(**SCENES["far below zero"])
    assert float((head.hidden @ head.weight.mT + head.options["bias"]).max()) < -250


@pytest.mark.parametrize(("name", "ratio_level", "advantage_level"), OWN)
def test_a_frozen_head(name, ratio_level, advantage_level):
    compare(
        Head(bias=0.0), name, ratio_level, advantage_level, frozen=True,
        loss_within=POLICY_LOSS_FLOAT32, gradient_within=POLICY_GRADIENT_FLOAT32,
    )  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("name", "ratio_level", "advantage_level"), OWN)
def test_bfloat16_operands(name, ratio_level, advantage_level, frozen):
    """Logits, logprobs and coefficients stay float32; the gradients are rounded to bfloat16."""
    compare(
        Head(torch.bfloat16), name, ratio_level, advantage_level, frozen=frozen,
        loss_within=POLICY_LOSS_FLOAT32, gradient_within=POLICY_GRADIENT_BFLOAT16,
    )  # fmt: skip


def test_columns_of_padding_get_no_gradient():
    head = Head(vocab=53)
    head.weight[53:] = 1e3
    leaves = head.leaves()
    loss, _ = loss_of(leaves, head, head.batch, *OWN[0])
    loss.backward()
    assert float(leaves[1].grad[53:].abs().max()) == 0
    assert float(leaves[1].grad[:53].abs().max()) > 0


def gradients_of(leaves, head, batch, *own, **changes):
    loss, metrics = loss_of(leaves, head, batch, *own, **changes)
    loss.backward()
    return loss, metrics, [leaf.grad for leaf in leaves if leaf is not None and leaf.requires_grad]


def same(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("own", OWN)
def test_strided_operands_change_nothing(own):
    head = Head()
    loss, _, (by_hidden, by_weight) = gradients_of(head.leaves(), head, head.batch, *own)
    wide = torch.full((V, 2 * H), math.nan)
    wide[:, ::2] = head.weight
    upright = head.hidden.mT.contiguous().requires_grad_()
    wide.requires_grad_()
    strided, _ = loss_of((upright.mT, wide[:, ::2], None), head, head.batch, *own)
    strided.backward()
    assert not upright.mT.is_contiguous()
    assert strided.item() == pytest.approx(loss.item(), abs=POLICY_LOSS_FLOAT32)
    assert float((upright.grad.mT - by_hidden).abs().max() / by_hidden.abs().max()) < POLICY_GRADIENT_FLOAT32
    assert float((wide.grad[:, ::2] - by_weight).abs().max() / by_weight.abs().max()) < POLICY_GRADIENT_FLOAT32


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("own", OWN)
def test_backward_twice(own, frozen):
    head = Head()
    leaves = head.leaves(frozen=frozen)
    loss, _ = loss_of(leaves, head, head.batch, *own)
    loss.backward(retain_graph=True)
    first = leaves[0].grad.clone()
    loss.backward()
    assert torch.equal(leaves[0].grad, first + first)
    assert float(first.abs().max()) > 0


@pytest.mark.parametrize("masked", [False, True])
def test_a_derivative_of_the_gradient_is_refused_and_not_wrong(masked):
    head = Head()
    leaves = head.leaves()
    loss, _ = loss_of(leaves, head, head.batch, *OWN[1], mask=head.batch.mask if masked else None)
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.autograd.grad(loss, leaves[0], create_graph=True)


@pytest.mark.parametrize("upstream", [0.0, -0.25, 1e3])
def test_upstream_gradients_scale(upstream):
    head = Head()
    _, _, once = gradients_of(head.leaves(), head, head.batch, *OWN[2])
    leaves = head.leaves()
    loss, _ = loss_of(leaves, head, head.batch, *OWN[2])
    loss.backward(torch.tensor(upstream))
    for leaf, gradient in zip(leaves[:2], once, strict=True):
        error = (leaf.grad - upstream * gradient).abs().max()
        assert float(error) <= POLICY_GRADIENT_FLOAT32 * abs(upstream) * float(gradient.abs().max())


def test_descent_makes_what_had_an_advantage_likelier():
    head = Head()
    batch = dataclasses.replace(head.batch, advantages={"token": torch.ones(N)})
    for name in ("cispo", "grpo", "dapo", "dr_grpo"):
        leaves = head.leaves()
        gradients_of(leaves, head, batch, name, "token", "token", eps_high=5.0, **(
            {} if name in ("cispo", "grpo") else {"eps_low": 0.5}
        ))  # fmt: skip
        moved = head.hidden - 0.1 * leaves[0].grad
        before, after = (oracle_logprobs(x, head.weight, batch.labels)[batch.mask] for x in (head.hidden, moved))
        assert bool((after > before).all())


# -- rows that do not count


def poisoned(head, batch):
    """NaN and labels out of range wherever the mask is false."""
    off = ~batch.mask
    rotten = dataclasses.replace(
        batch,
        labels=batch.labels.masked_fill(off, -100),
        old_logprobs=batch.old_logprobs.masked_fill(off, math.nan),
        reference_logprobs=batch.reference_logprobs.masked_fill(off, math.inf),
        advantages={**batch.advantages, "token": batch.advantages["token"].masked_fill(off, math.nan)},
    )
    return head.hidden.masked_fill(off.unsqueeze(1), math.nan).requires_grad_(), rotten


@pytest.mark.parametrize(("name", "ratio_level", "advantage_level"), EVERY)
def test_what_stands_in_inactive_rows_reaches_nothing(name, ratio_level, advantage_level):
    head = Head()
    own = (name, ratio_level, advantage_level)
    beta = {"beta": 0.05}
    loss, metrics, clean = gradients_of(
        head.leaves(), head, head.batch, *own, **beta, reference_logprobs=head.batch.reference_logprobs
    )
    hidden, rotten = poisoned(head, head.batch)
    leaves = (hidden, head.leaves()[1], None)
    found, found_metrics, gradients = gradients_of(
        leaves, head, rotten, *own, **beta, reference_logprobs=rotten.reference_logprobs
    )
    assert torch.equal(found, loss)
    assert same(gradients, clean)
    assert {name: value.item() for name, value in found_metrics.items()} == {
        name: value.item() for name, value in metrics.items()
    }
    assert float(gradients[0][~head.batch.mask].abs().max()) == 0
    # the same poison in a row that counts is refused, or shows
    everywhere = {**beta, "reference_logprobs": rotten.reference_logprobs, "mask": None}
    with pytest.raises(ValueError, match=r"finite|cu_seqlens"):
        loss_of(leaves, head, rotten, *own, **everywhere)
    spoilt = head.hidden.clone()
    spoilt[int(head.batch.mask.nonzero()[0])] = math.nan
    assert loss_of((spoilt, leaves[1], None), head, head.batch, *own)[0].isnan()


@pytest.mark.parametrize("own", OWN)
def test_padding_behind_the_last_sequence(own):
    head = Head()
    batch = head.batch
    loss, _, clean = gradients_of(head.leaves(), head, batch, *own)
    pad = 5

    def padded(tensor, value):
        return torch.cat([tensor, tensor.new_full((pad, *tensor.shape[1:]), value)])

    longer = dataclasses.replace(
        batch, labels=padded(batch.labels, -1), mask=padded(batch.mask, False), turn_ids=padded(batch.turn_ids, -1),
        old_logprobs=padded(batch.old_logprobs, math.nan),
        advantages={**batch.advantages, "token": padded(batch.advantages["token"], 0.0)},
    )  # fmt: skip
    leaves = (padded(head.hidden, 7.0).requires_grad_(), head.leaves()[1], None)
    found, _, gradients = gradients_of(leaves, head, longer, *own)
    assert torch.equal(found, loss)
    assert torch.equal(gradients[0][:N], clean[0])
    assert torch.equal(gradients[1], clean[1])
    assert float(gradients[0][N:].abs().max()) == 0
    if own[0] in ("grpo", "gspo"):
        with pytest.raises(ValueError, match="place in cu_seqlens"):
            seen = {"mask": padded(batch.mask, True), "check": True}
            finite = dataclasses.replace(longer, old_logprobs=padded(batch.old_logprobs, -1.0))
            loss_of(leaves, head, finite, *own, **seen)


@pytest.mark.parametrize(("name", "ratio_level", "advantage_level"), EVERY)
def test_sequence_ids_say_what_cu_seqlens_say(name, ratio_level, advantage_level):
    head = Head()
    own = (name, ratio_level, advantage_level)
    loss, _, gradients = gradients_of(head.leaves(), head, head.batch, *own)
    ids = {"cu_seqlens": None, "sequence_ids": head.batch.sequence_ids.int()}
    other, _, others = gradients_of(head.leaves(), head, head.batch, *own, **ids)
    assert torch.equal(loss, other)
    assert same(gradients, others)


@pytest.mark.parametrize("own", OWN)
def test_without_a_mask_every_row_counts(own):
    head = Head()
    batch = dataclasses.replace(head.batch, mask=torch.ones(N, dtype=torch.bool))
    loss, metrics, gradients = gradients_of(head.leaves(), head, batch, *own)
    other, _, others = gradients_of(head.leaves(), head, batch, *own, mask=None, check=False)
    assert torch.equal(loss, other)
    assert same(gradients, others)
    assert metrics["active_tokens"].item() == N


@pytest.mark.parametrize("own", OWN)
def test_a_batch_of_nothing(own):
    head = Head()
    batch = dataclasses.replace(head.batch, mask=torch.zeros(N, dtype=torch.bool))
    needs = {"cispo": "tokens", "dapo": "tokens", "grpo": "sequences", "gspo": "sequences"}
    if own[0] in needs:
        with pytest.raises(ValueError, match=f"no row is active: {own[0]}'s mean over {needs[own[0]]}"):
            loss_of(head.leaves(), head, batch, *own)
    loss, metrics, gradients = gradients_of(head.leaves(), head, batch, *own, denominator=100.0)
    assert loss.item() == 0
    assert all(float(gradient.abs().max()) == 0 for gradient in gradients)
    assert [gradient.shape for gradient in gradients] == [(N, H), (V, H)]
    assert metrics.pop("active_tokens").item() == 0
    assert all(value.isnan() for value in metrics.values())


@pytest.mark.parametrize("denominator", [50.0, torch.tensor(50)])
@pytest.mark.parametrize("own", OWN)
def test_parts_with_the_whole_batchs_denominator_add_up(own, denominator):
    """Gradient accumulation: whole sequences in each part; the second has an inactive one alone."""
    head = Head()
    batch = head.batch
    whole, _, (wanted, _) = gradients_of(head.leaves(), head, batch, *own, denominator=denominator)
    leaves = head.leaves()
    total = 0.0
    for sequences in ((0, 2), (3,), (1, 4)):
        mask = batch.mask & torch.isin(batch.sequence_ids, torch.tensor(sequences))
        loss, _ = loss_of(leaves, head, batch, *own, denominator=denominator, mask=mask)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole.item(), abs=POLICY_LOSS_FLOAT32)
    assert float((leaves[0].grad - wanted).abs().max() / wanted.abs().max()) < POLICY_GRADIENT_FLOAT32


# -- metrics


def test_metrics_of_a_call():
    head = Head()
    _, metrics = loss_of(head.leaves(), head, head.batch, *OWN[0], reference_logprobs=head.batch.reference_logprobs)
    rows = head.batch.mask
    logprobs = oracle_logprobs(head.hidden, head.weight, head.batch.labels)[rows]
    difference = logprobs - head.batch.old_logprobs[rows]
    whole = torch.log_softmax(head.hidden.double() @ head.weight.double().mT, dim=-1)[rows]
    wanted = {
        "active_tokens": int(rows.sum()),
        "clip_fraction_high": float((difference.exp() > 1.3).double().mean()),
        "clip_fraction_low": 0.0,
        "ratio_max": float(difference.exp().max()),
        "kl_old_new_k1": float(-difference.mean()),
        "mean_logprob_nats": float(logprobs.mean()),
        "mean_entropy_nats": float(-(whole.exp() * whole).sum(dim=1).mean()),
        "kl_new_reference_k1": float((logprobs - head.batch.reference_logprobs[rows]).mean()),
    }
    found = {name: metrics[name].item() for name in wanted}
    assert found == pytest.approx(wanted, abs=POLICY_LOSS_FLOAT32)
    assert 0 < found["clip_fraction_high"] < 1
    assert not any(value.requires_grad for value in metrics.values())


def test_a_reference_without_beta_is_measured_and_no_more():
    head = Head()
    plain, without, clean = gradients_of(head.leaves(), head, head.batch, *OWN[2])
    reference = {"reference_logprobs": head.batch.reference_logprobs}
    loss, metrics, gradients = gradients_of(head.leaves(), head, head.batch, *OWN[2], **reference)
    assert torch.equal(plain, loss)
    assert same(gradients, clean)
    assert without["kl_new_reference_k3"].isnan()
    assert metrics["kl_new_reference_k3"].item() > 0
    penalised, _ = loss_of(head.leaves(), head, head.batch, *OWN[2], **reference, beta=0.5)
    k3 = metrics["kl_new_reference_k3"].item()
    assert penalised.item() - loss.item() == pytest.approx(0.5 * k3, abs=POLICY_LOSS_FLOAT32)


# -- what is refused

NAN = math.nan
WRONG = [
    ({"objective": "ppo"}, "one of cispo"),
    ({"objective": "gspo", "eps_low": None}, "needs eps_low"),
    ({"ratio_level": "sequence"}, "sequence/token .*coarser"),
    ({"ratio_level": "turn"}, "turn/token .*coarser"),
    ({"eps_high": -0.1}, "eps_high must be"),
    ({"eps_low": None}, "needs eps_low"),
    ({"beta": 0.1}, "needs reference_logprobs"),
    ({"beta": -0.1}, "beta must be"),
    ({"beta": NAN}, "beta must be"),
    ({"objective": "dr_grpo"}, "needs a denominator"),
    ({"denominator": 0.0}, "denominator must be"),
    ({"denominator": NAN}, "denominator must be"),
    ({"denominator": True}, "denominator must be"),
    ({"denominator": torch.tensor(-1.0)}, "denominator must be"),
    ({"denominator": torch.ones(2)}, "denominator must be"),
    ({"hidden": torch.zeros(N, H, 1)}, "do not fit"),
    ({"labels": torch.zeros(N - 1, dtype=torch.int64)}, "do not fit"),
    ({"labels": torch.zeros(N)}, "integers"),
    ({"labels": torch.full((N,), V)}, "within 0 and 60"),
    ({"labels": torch.full((N,), -100)}, "within 0 and 60"),
    ({"lm_head_weight": torch.zeros(V, H + 1)}, "do not fit"),
    ({"temperature": 0.0}, "temperature"),
    ({"old_logprobs": torch.zeros(N + 1)}, "old_logprobs must be"),
    ({"old_logprobs": torch.zeros(N).bfloat16()}, "old_logprobs must be float32 or float64"),
    ({"old_logprobs": torch.full((N,), NAN)}, "old_logprobs must be finite"),
    ({"old_logprobs": torch.full((N,), -math.inf)}, "old_logprobs must be finite"),
    ({"reference_logprobs": torch.zeros(N, 1)}, "reference_logprobs must be"),
    ({"reference_logprobs": torch.full((N,), NAN)}, "reference_logprobs must be finite"),
    ({"advantages": torch.zeros(N - 1)}, "advantages must be"),
    ({"advantages": torch.zeros(N, 1)}, "advantages must be"),
    ({"advantages": torch.zeros(N, dtype=torch.int64)}, "advantages must be floating"),
    ({"advantages": torch.full((N,), math.inf)}, "advantages must be finite"),
    ({"mask": torch.ones(N, dtype=torch.int64)}, "mask must be bool"),
    ({"mask": torch.ones(N)}, "mask must be bool"),
    ({"mask": torch.ones(N - 1, dtype=torch.bool)}, "mask must be bool"),
]
SEQUENCES = {"objective": "grpo", "eps_low": None, "advantage_level": "sequence", "advantages": torch.ones(5)}
TURNS = {"ratio_level": "turn", "advantage_level": "turn", "advantages": torch.ones(12)}
WRONG_STRUCTURE = [
    ({**SEQUENCES, "cu_seqlens": None}, "needs sequence_ids or cu_seqlens"),
    ({**SEQUENCES, "sequence_ids": torch.zeros(N, dtype=torch.int64)}, "give one of them"),
    ({**SEQUENCES, "advantages": torch.ones(N)}, f"{N} advantages for the 5 sequences"),
    ({**SEQUENCES, "cu_seqlens": torch.tensor([1, 9, 10, 24, 27, 33])}, "must rise from 0"),
    ({**SEQUENCES, "cu_seqlens": torch.tensor([0, 9, 8, 24, 27, 33])}, "must rise from 0"),
    ({**SEQUENCES, "cu_seqlens": torch.tensor([0, 9, 10, 24, 27, 34])}, "must rise from 0"),
    ({**SEQUENCES, "cu_seqlens": torch.tensor([0, 9, 10, 24, 27, 28])}, "place in cu_seqlens"),
    ({**SEQUENCES, "cu_seqlens": torch.zeros(6)}, "int32 or int64"),
    ({**SEQUENCES, "cu_seqlens": torch.zeros(0, dtype=torch.int64)}, "int32 or int64"),
    ({**SEQUENCES, "cu_seqlens": None, "sequence_ids": torch.full((N,), 5)}, "sequence_ids must be within 0 and 4"),
    ({**SEQUENCES, "cu_seqlens": None, "sequence_ids": torch.full((N,), -1)}, "sequence_ids must be within 0 and 4"),
    ({**SEQUENCES, "cu_seqlens": None, "sequence_ids": torch.zeros(N)}, "sequence_ids must be int"),
    ({**SEQUENCES, "advantages": torch.tensor([1.0, NAN, 1.0, 1.0, 1.0])}, "advantages must be finite"),
    ({**TURNS, "turn_ids": None}, "needs turn_ids"),
    ({**TURNS, "turn_ids": torch.full((N,), 12)}, "turn_ids must be within 0 and 11"),
    ({**TURNS, "turn_ids": torch.zeros(N, dtype=torch.int64)}, "more than one sequence"),
]


def call(head, **changes):
    batch = head.batch
    arguments = {
        "hidden": head.hidden, "lm_head_weight": head.weight, "labels": batch.labels,
        "advantages": batch.advantages["token"], "old_logprobs": batch.old_logprobs, "objective": "dapo",
        "eps_low": 0.2, "eps_high": 0.28, **batch.structure, **changes,
    }  # fmt: skip
    return fused_policy_loss(**arguments)


@pytest.mark.parametrize(("changes", "what"), [*WRONG, *WRONG_STRUCTURE])
def test_what_is_wrong_is_refused(changes, what):
    head = Head()
    assert call(head)[0].isfinite()
    with pytest.raises(ValueError, match=what):
        call(head, **changes)


def test_a_sequence_without_active_rows_may_have_any_advantage():
    advantages = torch.tensor([1.0, -1.0, 0.5, NAN, 1.0])
    assert call(Head(), **{**SEQUENCES, "advantages": advantages})[0].isfinite()


def test_only_values_are_left_unchecked():
    head = Head()
    spoilt = head.batch.old_logprobs.clone()
    spoilt[int(head.batch.mask.nonzero()[0])] = NAN
    assert call(head, old_logprobs=spoilt, check=False)[0].isnan()
    with pytest.raises(ValueError, match="old_logprobs must be"):
        call(head, old_logprobs=spoilt[1:], check=False)


def test_the_call_of_a_user_who_wants_only_the_kernel():
    head = Head()
    loss, metrics = fused_policy_loss(
        head.hidden, head.weight, head.batch.labels, head.batch.advantages["token"], head.batch.old_logprobs,
        objective="cispo", eps_high=4.0, beta=0.0, temperature=1.0, chunk_tokens=2048,
    )  # fmt: skip
    assert loss.isfinite()
    assert metrics["active_tokens"].item() == N
