"""Every tolerance of the tests, in one table. Values are absolute unless the name says otherwise."""

#: float32 log-softmax over up to a thousand columns against the same in float64, in nats: a few units in the last place
#: of values around 10
LOGPROB_FLOAT32_NATS = 5e-6
#: entropy in float32 against float64, in nats: a sum of as many products
ENTROPY_FLOAT32_NATS = 1e-5
#: the head in float32 over up to 64 hidden units, then a log-softmax, against float64, in nats
LINEAR_LOGPROB_FLOAT32_NATS = 2e-5

#: exp(x) - 1 - x by series and squaring against an 80-bit reference, relative
EXPM1_MINUS_RELATIVE = 1e-11
#: the same at x = 1e-9 against x^2 / 2, whose next term is x / 3 of it, relative
TINY_K3_RELATIVE = 1e-9
#: a float64 mean of up to a million terms, summed by a fixed tree, against `math.fsum` of them, relative
TREE_MEAN_RELATIVE = 1e-14
#: per-sequence float64 sums of float32 differences, added one by one, against `math.fsum`, relative
SEQUENCE_SUM_RELATIVE = 1e-12

#: a 135M model in float32: decoding through the KV cache against one pass over the same tokens, in nats
DECODE_AGAINST_ONE_PASS_FLOAT32_NATS = 1e-4
#: mean and variance of 200 thousand standard normal draws: some nine standard errors of the mean
SAMPLE_MOMENT = 0.02
#: two float32 forwards of the two-layer smoke model that add in another order, in nats; seen: 4e-6
SMOKE_FLOAT32_NATS = 2e-5
#: float32 attention outputs of magnitude one, and log-sum-exps, under another order of summation
ATTENTION_FLOAT32 = 2e-6
#: two float32 forwards of a two-layer random Llama, 64 hidden units, that add in another order, in nats; seen: 6e-6
TINY_LLAMA_FLOAT32_NATS = 2e-5
#: float32 attention over logits of magnitude ten, against float64: some ten ulp of those, softcap's tanh included
PAGED_ATTENTION_FLOAT32 = 1e-5
#: a policy objective's loss and coefficients in float64, magnitude one, against the same by autograd, token by token
POLICY_FLOAT64 = 1e-13
#: k3 by expm1 at x = 1e-7 against x^2 / 2, whose next term is x / 3 of it, relative
POLICY_K3_RELATIVE = 1e-6

#: the head's kernels, logits of a few nats: float32 sums and powers of two against float64 of the same operands, nats
HEAD_LOGPROB_NATS = 2e-5
#: entropies likewise: a sum of products p log p
HEAD_ENTROPY_NATS = 3e-5
#: logprobs whose logits are about 1000, where float32 values are 6e-5 apart, in nats
LARGE_LOGIT_LOGPROB_NATS = 3e-4
#: gradients from probabilities rounded to bfloat16 (2^-9 each), then rounded once more: norm against norm
BFLOAT16_GRADIENT_RELATIVE = 6e-3
#: policy loss and metrics of magnitude one through a float32 head, logits up to ten, against float64
POLICY_LOSS_FLOAT32 = 2e-6
#: gradients of the same, relative to the greatest element
POLICY_GRADIENT_FLOAT32 = 5e-6
#: the two with logits, and logprobs, of up to some hundreds, whose float32 spacing is 3e-5
POLICY_LOSS_FLOAT32_FAR = 1e-4
POLICY_GRADIENT_FLOAT32_FAR = 5e-5
#: gradients that are rounded to bfloat16, after probabilities that may be, relative to the greatest element
POLICY_GRADIENT_BFLOAT16 = 1e-2
#: float32 gradients of magnitude one of a logprob and an entropy, against float64 autograd
LOGPROB_GRADIENT_FLOAT32 = 5e-6
#: the same rounded to their dtype: half a unit in the last place, relative to the gradient
GRADIENT_ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
#: the logprob of a token that leaves e^-5 to e^-20 to all others, whose logits are float32 values up to 30: relative
LIKELY_LOGPROB_RELATIVE = 3e-5
#: two float32 log-softmaxes of one row of 49152 bfloat16 logits, torch's and the twin's, in nats; seen: 1.2e-5
SAME_LOGITS_NATS = 5e-5
#: a 135M model in bfloat16 split over ranks against one process, mean over tokens, in nats; known: 0.039
BFLOAT16_SPLIT_MEAN_NATS = 0.08
#: float64 sums of ratios, KL terms and advantages over some thousand tokens in another order, relative
FUNCTIONAL_RELATIVE = 1e-9
#: values formed in float64 from float32 differences, or of logarithms rounded to float32, against float64, relative
FLOAT32_RELATIVE = 1e-6
#: estimators that agree to the first order, of policies 1e-3 nats apart, relative; and how far others must be
NEAR_POLICIES_RELATIVE = 1e-2
#: a whitened variance, whose epsilon is 1e-8, against 1
WHITENED_RELATIVE = 1e-6
#: central differences of step 1e-6 of a loss of magnitude one in float64: its rounding over the step
FINITE_DIFFERENCE = 1e-8

#: the temperature that fits 320 bfloat16 logprobs of a 135M model, relative; seen: 0.006
DOCTOR_TEMPERATURE_RELATIVE = 0.02
