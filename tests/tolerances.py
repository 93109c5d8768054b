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
#: float32 attention over logits of magnitude ten, against float64: some ten ulp of those logits, softcap's tanh included
PAGED_ATTENTION_FLOAT32 = 1e-5
