"""Every tolerance of these tests, in one table; in nats."""

#: the tiny Llama in float32 on both sides, other orders of sums
FLOAT32_NATS = 2e-5
#: a log-softmax of logprobs, over a vocabulary of 260
AGAIN_NATS = 1e-6
