"""hf's generator: it samples on the way that hf's rollout side scores."""

from __future__ import annotations

import pytest
import tolerances
from hf_fixtures import VOCABULARY, Bench, greatest, save_model

from libxd import freezing, prompts, sampling
from libxd.errors import Status, XdError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from libxd.runtimes.hf.generator import Generator  # noqa: E402


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers

    place = tmp_path_factory.mktemp("models") / "tiny"
    save_model(place)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(place)
    return place


PROMPTS = [{"text": "w3 w5 w7"}, {"text": "w9 w2 w4 w6 w8 w1"}, {"text": "w11"}]


@pytest.mark.parametrize("batch_size", [1, 2, 6])
def test_what_was_seen_while_sampling_is_what_rollout_scores(directory, batch_size):
    """The same prefill and the same steps; what is left is the log-softmax, in float64 here and in float32 there."""
    rows = [prompts.Prompt(f"p{number}", content, "") for number, content in enumerate(PROMPTS)]
    asked = sampling.Sampling(2, 6, 1.0, 1.0, 3, batch_size, "float32")
    generator = Generator(str(directory), "float32", "cpu")
    frozen = freezing.freeze(sampling.sample(generator, rows, asked, lambda _: None), {})
    generator.close()
    scored = Bench(directory).logprobs("rollout", frozen, batch__size=batch_size)
    assert greatest(frozen.logprobs, scored) < tolerances.TINY_LLAMA_FLOAT32_NATS


def test_one_file_holds_text_or_conversations(directory):
    generator = Generator(str(directory), "float32", "cpu")
    assert generator.encode({"text": "w3 w5"}) == [3, 5]
    with pytest.raises(XdError, match="do not go into one file"):
        generator.encode({"messages": [{"role": "user", "content": "w3"}]})
    assert generator.describe()["tokenizer"]["policy"] == "plain"
    other = Generator(str(directory), "float32", "cpu")
    assert other.encode({"messages": [{"role": "user", "content": "w3"}]}) == [3]
    assert other.describe()["tokenizer"]["policy"] == "chat_template"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(directory):
    with pytest.raises(XdError, match="no CUDA device") as refused:
        Generator(str(directory), "float32", "cuda")
    assert refused.value.status == Status.REFUSED
